# SPDX-License-Identifier: Apache-2.0
"""Measure how many drafts of the MTP head the tiny model accepts.

    python tools/train_tiny_model/evaluate_mtp.py tests/assets/tiny-qwen3-next

The backbone continues held-out texts and answers chats greedily.  A draft is
accepted where it is the token that the backbone said.  The acceptance length is the
mean number of tokens of a verification: the drafts accepted, and one more.  The
numbers go into `training.json` of the folder.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from checkpoint import write_json
from data import load_corpus, probes
from mtp import Head
from network import IM_END, Network, network_weights
from safetensors.torch import load_file
from torch import Tensor
from train_mtp import DRAFTS, WEIGHTS, load_backbone
from transformers import AutoModelForCausalLM

PROMPT = 128
"""Tokens of held-out text before a continuation."""


def load_head(folder: Path) -> Head:
    """The folder's head in float32."""
    weights = load_file(folder / WEIGHTS)
    named = {name.removeprefix("mtp."): w.float() for name, w in weights.items()}
    head = Head()
    head.load_state_dict(network_weights(named))
    return head.requires_grad_(False)


def text_prompts(text: str, count: int) -> list[list[int]]:
    """Pieces of held-out text, spread over all of it."""
    data = list(text.encode())
    step = (len(data) - PROMPT) // count
    return [data[at : at + PROMPT] for at in range(0, step * count, step)]


def continue_greedily(model: Any, prompt: Sequence[int], tokens: int) -> list[int]:
    """Prompt and answer, up to the end of the turn or `tokens` more."""
    out = model.generate(
        torch.tensor([list(prompt)]), max_new_tokens=tokens, eos_token_id=IM_END
    )
    return list(map(int, out[0]))


def drafted(backbone: Network, head: Head, tokens: Sequence[int]) -> Tensor:
    """Whether draft j at position t is right (drafts, positions)."""
    length = len(tokens)
    room = -length % 64  # the backbone's chunk
    row = torch.tensor([[*tokens, *[0] * room]])
    mask = torch.ones(length + room, length + room, dtype=torch.bool).tril()
    hidden = backbone.hidden_states(row, mask[None, None])[:, : length - 1]
    embedded = backbone.model.embed_tokens(row[:, 1:length])
    outputs = head(hidden, embedded, DRAFTS)
    said = torch.stack([backbone.lm_head(x[0, :-1]).argmax(-1) for x in outputs])
    return said == row[0, 2:length]


def verifications(right: Tensor, prompt: int, drafts: int) -> list[int]:
    """How many drafts each verification accepts, after a prompt of so many tokens.

    The last verifications, whose drafts the sequence's end cuts off, are left out.
    """
    accepted, at = [], prompt - 1
    while at + drafts <= right.shape[1]:
        run = 0
        while run < drafts and bool(right[run, at + run]):
            run += 1
        accepted.append(run)
        at += run + 1
    return accepted


@torch.no_grad()
def measure(
    model: Any,
    backbone: Network,
    head: Head,
    prompts: Sequence[Sequence[int]],
    tokens: int,
) -> dict[str, float]:
    """Acceptance length by number of drafts."""
    accepted: dict[int, list[int]] = {k: [] for k in range(1, DRAFTS + 1)}
    for prompt in prompts:
        right = drafted(backbone, head, continue_greedily(model, prompt, tokens))
        for drafts, runs in accepted.items():
            runs += verifications(right, len(prompt), drafts)
    return {
        str(drafts): round(1 + sum(runs) / len(runs), 3)
        for drafts, runs in accepted.items()
    }


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Acceptance length of the MTP head.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=32, help="prompts of each kind")
    parser.add_argument("--tokens", type=int, default=64, help="of each continuation")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.float32)
    text = load_corpus().held_out
    chats = [probe.tokens for probe in probes(text, 99, args.count, 200, 500)]
    kinds = {"text": text_prompts(text, args.count), "chats": chats}
    backbone, head = load_backbone(args.folder), load_head(args.folder)
    result = {
        kind: measure(model, backbone, head, prompts, args.tokens)
        for kind, prompts in kinds.items()
    }
    print(json.dumps(result), flush=True)
    path = args.folder / "training.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    record["mtp"]["acceptance_length"] = {
        "prompts_of_each_kind": args.count,
        "tokens_of_each_continuation": args.tokens,
        "by_drafts": result,
    }
    write_json(path, record)


if __name__ == "__main__":
    main()
