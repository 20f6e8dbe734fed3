# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of Qwen3.5 that takes images, and requests with images."""

from __future__ import annotations

import base64
import io
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.engines import web
from tests.engines.slow_decay import QWEN3_5, ROPE, SMALL, write_with_images

SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
"""Behind the 259 tokens that the tokenizer has."""
FIRST_SPECIAL = 259
TORCHVISION = Path(sys.prefix) / "torchvision"
"""Where `tools/install.sh` has it for vLLM's CPU build: for tests with images alone."""
SIDE = 96
"""Pixels of an image: nine tokens."""
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}"
    "{{ part['text'] }}{% else %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def with_torchvision() -> dict[str, Any]:
    """Fields of `Setup` for a server that finds it in that folder."""
    paths = (str(TORCHVISION), os.environ.get("PYTHONPATH", ""))
    found = os.pathsep.join(filter(None, paths))
    # What is forked has looked for it already.
    return {"environment": {"PYTHONPATH": found}, "cold": True}


def write_qwen3_5(folder: Path, seed: int = 0) -> Path:
    """Write a Qwen3.5 with a small tower, its processor and random weights."""
    from transformers import Qwen3_5Config

    turned = {
        "partial_rotary_factor": 1.0,
        "mrope_section": [6, 5, 5],
        "mrope_interleaved": True,
    }
    # vLLM's kernels for CPUs take no heads of 32.
    heads = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
    text = QWEN3_5 | heads | {"rope_parameters": ROPE | turned}
    tower = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "out_hidden_size": SMALL["hidden_size"],
        "num_position_embeddings": 36,
        "deepstack_visual_indexes": [],
        "patch_size": 16,
    }
    start, end, image, video = range(FIRST_SPECIAL, FIRST_SPECIAL + len(SPECIAL))
    config = Qwen3_5Config(
        text_config=text,
        vision_config=tower,
        vision_start_token_id=start,
        vision_end_token_id=end,
        image_token_id=image,
        video_token_id=video,
        tie_word_embeddings=False,
    )
    write_with_images(config, folder, seed, {"full_attention_interval": 4})
    _write_processor(folder)
    return folder


def _write_processor(folder: Path) -> None:
    """What turns images into patches, and the tokens that stand for them."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    like = tokenizer["added_tokens"][0]
    tokenizer["added_tokens"] += [
        {**like, "id": FIRST_SPECIAL + number, "content": token}
        for number, token in enumerate(SPECIAL)
    ]
    path.write_text(json.dumps(tokenizer))
    path = folder / "tokenizer_config.json"
    found = json.loads(path.read_text())
    path.write_text(json.dumps(found | {"chat_template": TEMPLATE}))
    common: dict[str, Any] = {
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "size": {"shortest_edge": 64 * 64, "longest_edge": 256 * 256},
    }
    files = {
        "preprocessor_config.json": {
            **common,
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "processor_class": "Qwen3VLProcessor",
        },
        "video_preprocessor_config.json": {
            **common,
            "video_processor_type": "Qwen3VLVideoProcessor",
            "processor_class": "Qwen3VLProcessor",
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2))


def image(seed: int) -> str:
    """An image of random patches, as a URL."""
    from PIL import Image

    coarse = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    pixels = coarse.repeat(SIDE // 6, axis=0).repeat(SIDE // 6, axis=1)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def question(before: str, url: str, behind: str) -> dict[str, Any]:
    """A message of a user: text, an image, and text behind it."""
    return {
        "role": "user",
        "content": [
            {"type": "text", "text": before},
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "text", "text": behind},
        ],
    }


def ask(url: str, model: str, messages: Sequence[Any]) -> tuple[list[Any], int, int]:
    """Ask over /v1/chat/completions.

    Args:
        url: of the server.
        model: that it serves.
        messages: of the chat.

    Returns:
        The answer's tokens with their log probabilities and those of other likely ones,
        the prompt's tokens, and how many of them came from the cache.
    """
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": 12,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 5,
    }
    response = web.post(f"{url}/v1/chat/completions", json=body, timeout=300)
    response.raise_for_status()
    told = response.json()
    details = told["usage"].get("prompt_tokens_details") or {}
    (choice,) = told["choices"]
    tokens = choice["logprobs"]["content"]
    return tokens, told["usage"]["prompt_tokens"], details.get("cached_tokens") or 0
