# SPDX-License-Identifier: Apache-2.0
"""Train the MTP head onto a finished tiny model, and add it to the folder.

    python tools/train_tiny_model/train_mtp.py tests/assets/tiny-qwen3-next

The backbone stays as it is.  Its hidden states over a sample of the training data
are computed once; the head learns to say after token t + 1 what the backbone will
say there, given the backbone's hidden state at t.  One core of a CPU is enough.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from checkpoint import write_json, write_weights
from data import Corpus, Source, load_corpus, make_batch
from mtp import Head
from network import Network, checkpoint_weights, network_weights
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

WEIGHTS = "mtp.safetensors"
DRAFTS = 3
LATER = 0.7
"""What a draft's loss counts, of that of the draft before it: it is often not used,
because the one before was rejected."""
CHAINS_FROM = 0.7
"""The share of the steps from which on chains of `DRAFTS` are trained; before, the
first draft alone, which is the input of the others."""


@dataclass(frozen=True)
class Sample:
    """Rows of text, and what the backbone made of them."""

    tokens: Tensor
    """(rows, length + 1)"""
    hidden: Tensor
    """After the final norm, in float16 (rows, length, hidden)."""
    weight: Tensor
    """Of each token in the loss (rows, length + 1)."""


def load_backbone(folder: Path) -> Network:
    """The folder's model in float32, frozen."""
    backbone = Network()
    weights = load_file(folder / "model.safetensors")
    merged = network_weights({name: w.float() for name, w in weights.items()})
    backbone.load_state_dict(merged)
    return backbone.requires_grad_(False)


@torch.no_grad()
def take_sample(backbone: Network, corpus: Corpus, args: argparse.Namespace) -> Sample:
    """Run the backbone over training data, all attention open, as engines do."""
    source = Source([corpus.docs] * 3 + [corpus.code] * 2, args.seed)
    mask = torch.ones(args.length, args.length, dtype=torch.bool).tril()[None, None]
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    rows = 4
    while len(parts) * rows * args.length < args.sample:
        batch = make_batch(source, rows, args.length, progress=1.0)
        tokens = torch.from_numpy(batch.tokens).long()
        hidden = backbone.hidden_states(tokens[:, :-1], mask).half()
        parts.append((tokens, hidden, torch.from_numpy(batch.weight)))
    return Sample(*(torch.cat(part) for part in zip(*parts, strict=True)))


def loss_of(
    head: Head, backbone: Network, sample: Sample, rows: Tensor, drafts: int
) -> tuple[Tensor, list[float]]:
    """Cross-entropy with the backbone's own predictions, and how often each draft
    is the backbone's likeliest token."""
    tokens, hidden = sample.tokens[rows], sample.hidden[rows].float()
    said = backbone.lm_head(hidden)[:, 1:]
    weight = sample.weight[rows][:, 2:]
    outputs = head(hidden, backbone.model.embed_tokens(tokens[:, 1:]), drafts)
    loss, right = torch.zeros(()), []
    for draft, output in enumerate(outputs):
        # The last position's draft is of a token that the backbone has not predicted;
        # the first positions lack a chain of this length.
        logits = backbone.lm_head(output[:, draft:-1])
        target = said[:, draft:]
        each = functional.cross_entropy(
            logits.transpose(1, 2),
            target.softmax(-1).transpose(1, 2),
            reduction="none",
        )
        counts = weight[:, draft:]
        loss = loss + LATER**draft * (each * counts).sum() / counts.sum()
        equal = logits.argmax(-1) == target.argmax(-1)
        right.append(round(float(equal.float().mean()), 4))
    return loss, right


def train(args: argparse.Namespace) -> None:
    """Train; write the weights and the record."""
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    corpus = load_corpus()
    backbone = load_backbone(args.folder)
    sample = take_sample(backbone, corpus, args)
    train_rows = len(sample.tokens) - args.held_rows
    begin = time.process_time()
    head = Head()
    head.start_from(backbone)
    optimizer = torch.optim.AdamW(
        head.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.02
    )
    for step in range(args.steps):
        share = step / args.steps
        drafts = DRAFTS if share > CHAINS_FROM else 1
        warm = min(1.0, (step + 1) / args.warmup)
        decay = 0.02 + 0.98 * (0.5 + 0.5 * math.cos(math.pi * share))
        for group in optimizer.param_groups:
            group["lr"] = args.lr * warm * decay
        rows = torch.randint(0, train_rows, (args.rows,))
        loss, right = loss_of(head, backbone, sample, rows, drafts)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        if step % args.log_every == 0:
            now = float(loss.detach())
            print(f"{step=} {share=:.3f} loss {now:.3f} {right=}", flush=True)
            write_head(args.folder, head)
    write_head(args.folder, head)
    with torch.no_grad():
        held = torch.arange(train_rows, len(sample.tokens))
        _, right = loss_of(head, backbone, sample, held, DRAFTS)
    record = {
        "machine": args.machine,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "parameters": sum(p.numel() for p in head.parameters()),
        "corpus": corpus.summary(),
        "settings": {k: v for k, v in vars(args).items() if k != "folder"},
        "sample_tokens": sample.hidden.shape[0] * sample.hidden.shape[1],
        "training_cpu_seconds": round(time.process_time() - begin),
        "held_rows_right": right,
    }
    write_record(args.folder, record)
    print(json.dumps(record), flush=True)


def write_head(folder: Path, head: Head) -> None:
    """Write the head beside the model."""
    weights = {f"mtp.{k}": v for k, v in checkpoint_weights(head).items()}
    write_weights(folder / WEIGHTS, weights)


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Replace the head's part of the folder's `training.json`."""
    path = folder / "training.json"
    whole = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    write_json(path, whole | {"mtp": record})


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Train an MTP head onto the model.")
    parser.add_argument("folder", type=Path, help="of the model; gets the head")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument(
        "--sample", type=int, default=409_600, help="tokens run through the backbone"
    )
    parser.add_argument("--rows", type=int, default=2, help="sequences in a batch")
    parser.add_argument("--length", type=int, default=512, help="tokens in a sequence")
    parser.add_argument("--held-rows", type=int, default=32, help="not trained on")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--warmup", type=int, default=50, help="steps")
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--log-every", type=int, default=100)
    parser.add_argument("--machine", default="", help="for the record")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
