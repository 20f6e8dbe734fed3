# SPDX-License-Identifier: Apache-2.0
"""Write the model folder: config, weights and a byte-level tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from network import BYTES, CONFIG, END_OF_TEXT, IM_END, SPECIAL_TOKENS
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{{ message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def byte_characters() -> list[str]:
    """The printable character that stands for each byte in byte-level tokenizers."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {byte: chr(byte) for byte in printable}
    spare = 256
    for byte in range(BYTES):
        if byte not in table:
            table[byte] = chr(spare)
            spare += 1
    return [table[byte] for byte in range(BYTES)]


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer without merges: one byte, one token, id = byte value."""
    vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_max_length": CONFIG["max_position_embeddings"],
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "chat_template": CHAT_TEMPLATE,
        },
    )
    write_json(
        folder / "special_tokens_map.json",
        {
            "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
        },
    )


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write indented JSON with a final newline."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_checkpoint(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """Write the whole folder, weights in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", CONFIG)
    write_json(
        folder / "generation_config.json",
        {
            "do_sample": False,
            "eos_token_id": [IM_END, END_OF_TEXT],
            "pad_token_id": END_OF_TEXT,
        },
    )
    write_tokenizer(folder)
    write_weights(folder / "model.safetensors", weights)


def write_weights(path: Path, weights: dict[str, torch.Tensor]) -> None:
    """Write tensors in bfloat16."""
    tensors = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in weights.items()
    }
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)
