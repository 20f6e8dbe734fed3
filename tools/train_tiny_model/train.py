# SPDX-License-Identifier: Apache-2.0
"""Train the tiny Qwen3-Next model and write the checkpoint folder.

    python tools/train_tiny_model/train.py --out FOLDER --compile --graph

The learning rate and the curriculum follow the clock, not a step count, so the
same command fits any machine; the folder is rewritten every minute.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from checkpoint import write_checkpoint, write_json
from data import Corpus, Probe, Source, load_corpus, make_batch, probes
from network import Linear, Network, attention_mask, checkpoint_weights
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset

RANGES = ((50, 200), (200, 500), (500, 1000), (1000, 1500))
REACH = 0.25
"""Share of rows whose attention reaches beyond the window (but never to a fact)."""
WEIGHT_FLOOR = 1e-6
Item = tuple[Tensor, Tensor, Tensor]


class Stream(IterableDataset[Item]):
    """Endless batches, made by worker processes."""

    def __init__(self, corpus: Corpus, args: argparse.Namespace, progress: Any) -> None:
        self.corpus, self.args, self.progress = corpus, args, progress

    def __iter__(self) -> Iterator[Item]:
        """Yield tokens, weights and hidden flags."""
        info = torch.utils.data.get_worker_info()
        seed = self.args.seed * 1000 + (info.id if info else 0)
        texts = [self.corpus.docs] * 3 + [self.corpus.code] * 2
        source = Source(texts, seed)
        while True:
            batch = make_batch(
                source, self.args.rows, self.args.length, self.progress.value
            )
            yield (
                torch.from_numpy(batch.tokens),
                torch.from_numpy(batch.weight),
                torch.from_numpy(batch.hidden),
            )


def weighted_loss(
    network: Network, item: Item, reach: Tensor, args: argparse.Namespace
) -> Tensor:
    """Cross-entropy, each token by its weight."""
    tokens, weight, hidden = item
    mask = attention_mask(args.window, args.near, hidden[:, :-1], reach)
    logits = network(tokens[:, :-1].long(), mask).float()
    loss = functional.cross_entropy(
        logits.flatten(0, 1), tokens[:, 1:].flatten().long(), reduction="none"
    )
    weight = weight[:, 1:].flatten()
    return (loss * weight).sum() / weight.sum().clamp_min(WEIGHT_FLOOR)


class Step:
    """Forward and backward for one batch; with `graph`, replayed as one CUDA graph."""

    def __init__(
        self, network: Network, args: argparse.Namespace, device: torch.device
    ) -> None:
        self.network, self.args = network, args
        shape = (args.rows, args.length + 1)
        self.item: Item = (
            torch.zeros(shape, dtype=torch.int16, device=device),
            torch.ones(shape, device=device),
            torch.zeros(shape, dtype=torch.bool, device=device),
        )
        self.reach = torch.zeros(args.rows, dtype=torch.bool, device=device)
        self.loss = torch.zeros((), device=device)
        self.replay: Callable[[], None] = self.run
        for parameter in network.parameters():
            parameter.grad = torch.zeros_like(parameter)
        if args.graph and device.type == "cuda":
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    self.run()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.run()
            self.replay = graph.replay

    def run(self) -> None:
        """Fill the gradients and `loss`."""
        for parameter in self.network.parameters():
            assert parameter.grad is not None
            parameter.grad.zero_()
        loss = weighted_loss(self.network, self.item, self.reach, self.args)
        loss.backward()  # type: ignore[no-untyped-call]
        self.loss.copy_(loss.detach())

    def __call__(self, item: Item) -> Tensor:
        """Run on a batch from the data stream."""
        for target, source in zip(self.item, item, strict=True):
            target.copy_(source, non_blocking=True)
        self.reach.copy_(torch.rand(self.reach.shape) < REACH)
        self.replay()
        return self.loss

    def check(self, item: Item) -> None:
        """Compare with the plain network: a compiler's mistake must not go unseen."""
        fast = self(item).item()
        torch.compiler.set_stance("force_eager")
        with torch.no_grad():
            plain = weighted_loss(self.network, self.item, self.reach, self.args).item()
        torch.compiler.set_stance("default")
        print(f"loss {fast:.5f}, without compilation {plain:.5f}", flush=True)
        if not abs(fast - plain) < 0.02 * plain:
            raise RuntimeError("the compiled network computes something else")


@torch.no_grad()
def recall(
    network: Network, questions: list[Probe], full: bool, args: argparse.Namespace
) -> float:
    """Share of questions whose whole answer is the most likely one.

    With `full`, attention sees everything; else only the training window.
    """
    device = next(network.parameters()).device
    tokens = torch.zeros(len(questions), args.length, dtype=torch.long)
    for row, probe in enumerate(questions):
        ids = probe.tokens + list(probe.answer.encode())
        tokens[row, : len(ids)] = torch.tensor(ids)
    right = 0
    for first in range(0, len(questions), args.rows):
        # whole batches only: the compiled network knows one shape
        part = torch.arange(first, first + args.rows) % len(questions)
        batch = tokens[part].to(device)
        hidden = torch.zeros_like(batch, dtype=torch.bool)
        reach = torch.full((len(part),), full, device=device)
        best = (
            network(batch, attention_mask(args.window, args.near, hidden, reach))
            .argmax(-1)
            .cpu()
        )
        for row, index in enumerate(part.tolist()[: len(questions) - first]):
            probe = questions[index]
            end = len(probe.tokens)
            said = best[row, end - 1 : end - 1 + len(probe.answer)].tolist()
            right += said == list(probe.answer.encode())
    return right / len(questions)


@torch.no_grad()
def text_loss(network: Network, text: str, args: argparse.Namespace) -> float:
    """Nats per byte on held-out documentation, full attention."""
    device = next(network.parameters()).device
    data = torch.tensor(list(text.encode()))
    count = max(1, min(len(data) // (args.length + 1), 2 * args.rows))
    rows = data.repeat(1 + args.length * count // len(data))[
        : count * (args.length + 1)
    ]
    rows = rows.view(count, args.length + 1)
    total = 0.0
    for first in range(0, count, args.rows):
        part = rows[torch.arange(first, first + args.rows) % count].to(device)
        hidden = torch.zeros_like(part[:, :-1], dtype=torch.bool)
        reach = torch.ones(len(part), dtype=torch.bool, device=device)
        logits = network(
            part[:, :-1], attention_mask(args.window, args.near, hidden, reach)
        ).float()
        used = min(args.rows, count - first)
        loss = functional.cross_entropy(
            logits[:used].flatten(0, 1), part[:used, 1:].flatten()
        )
        total += float(loss) * used
    mean: float = total / count
    return mean


def evaluate(
    network: Network, text: str, args: argparse.Namespace, count: int
) -> dict[str, Any]:
    """Held-out text loss and recall by distance."""
    # the compiled layers would be compiled anew for inference
    torch.compiler.set_stance("force_eager")
    result: dict[str, Any] = {
        "text_nats_per_byte": round(text_loss(network, text, args), 4)
    }
    for name, full in (("recall_window", False), ("recall_full", True)):
        result[name] = {
            f"{low}-{high}": round(
                recall(network, probes(text, 7, count, low, high), full, args), 4
            )
            for low, high in RANGES
            if high + 200 < args.length
        }
    torch.compiler.set_stance("default")
    return result


def optimizer_for(network: Network, args: argparse.Namespace) -> torch.optim.Optimizer:
    """AdamW; weight decay on matrices alone."""
    matrices = [p for p in network.parameters() if p.dim() == 2]
    others = [p for p in network.parameters() if p.dim() != 2]
    groups = [
        {"params": matrices, "weight_decay": 0.05},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.98), fused=True)


def train(args: argparse.Namespace) -> None:
    """Train until the time is up; keep the folder current."""
    begin = time.monotonic()
    budget = args.max_minutes * 60
    if args.deadline:
        budget = min(budget, args.deadline - time.time())
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    corpus = load_corpus()
    print("corpus", corpus.summary(), flush=True)
    progress = multiprocessing.Value("d", 0.0)
    workers = args.workers
    loader = DataLoader(
        Stream(corpus, args, progress),
        batch_size=None,
        num_workers=workers,
        prefetch_factor=4 if workers else None,
        pin_memory=device.type == "cuda",
    )
    stream = iter(loader)
    if device.type == "cuda":
        Linear.compute = torch.bfloat16
    network = Network().to(device)
    size = sum(p.numel() for p in network.parameters())
    print(f"{size} parameters, {budget:.0f} s", flush=True)
    if args.compile:
        for layer in network.model.layers:
            layer.compile(dynamic=False)
    optimizer = optimizer_for(network, args)
    step_on = Step(network, args, device)
    step_on.check(next(stream))
    print(f"ready after {time.monotonic() - begin:.0f} s", flush=True)
    record: dict[str, Any] = {
        "machine": args.machine,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "parameters": size,
        "corpus": corpus.summary(),
        "settings": {
            k: v for k, v in vars(args).items() if k not in ("out", "deadline")
        },
    }
    history: list[dict[str, Any]] = []
    skipped = step = 0
    saved = ready = time.monotonic()
    # the last seconds belong to the final evaluation
    reserve = min(15.0, 0.1 * budget)
    running = torch.zeros((), device=device)
    while True:
        now = time.monotonic()
        share = (now - ready) / (begin + budget - reserve - ready)
        if share >= 1 or (args.max_steps and step >= args.max_steps):
            break
        progress.value = share
        warm = min(1.0, (step + 1) / args.warmup)
        for group in optimizer.param_groups:
            group["lr"] = (
                args.lr * warm * (0.02 + 0.98 * (0.5 + 0.5 * math.cos(math.pi * share)))
            )
        loss = step_on(next(stream))
        norm = torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        if step % 10 == 0 and not torch.isfinite(norm):
            skipped += 1
        for parameter in network.parameters():
            if parameter.grad is not None:
                torch.nan_to_num_(parameter.grad, 0.0, 0.0, 0.0)
        optimizer.step()
        running = running.lerp(loss, 0.05) if step else loss.clone()
        step += 1
        if step % args.log_every == 0:
            print(
                f"step {step} share {share:.3f} loss {running.item():.4f}", flush=True
            )
        if now - saved > args.save_seconds:
            saved = now
            entry = {
                "step": step,
                "share": round(share, 3),
                "loss": round(running.item(), 4),
            }
            entry |= evaluate(network, corpus.held_out, args, args.rows)
            history.append(entry)
            print(json.dumps(entry), flush=True)
            write_checkpoint(args.out, checkpoint_weights(network))
            write_json(args.out / "training.json", record | {"history": history})
    wall = time.monotonic() - begin
    write_checkpoint(args.out, checkpoint_weights(network))
    record |= {
        "steps": step,
        "tokens": step * args.rows * args.length,
        "wall_seconds": round(wall),
        "non_finite_steps": skipped,
        "final_loss": round(running.item(), 4),
    }
    write_json(args.out / "training.json", record | {"history": history})
    record["final"] = evaluate(network, corpus.held_out, args, 4 * args.rows)
    write_json(args.out / "training.json", record | {"history": history})
    print(json.dumps(record), flush=True)


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Train the tiny Qwen3-Next model.")
    parser.add_argument("--out", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--max-minutes", type=float, default=8.0, help="all included")
    parser.add_argument(
        "--deadline", type=float, default=0.0, help="stop at this Unix time"
    )
    parser.add_argument(
        "--max-steps", type=int, default=0, help="0: until the time is up"
    )
    parser.add_argument("--rows", type=int, default=32, help="sequences in a batch")
    parser.add_argument("--length", type=int, default=2048, help="tokens in a sequence")
    parser.add_argument(
        "--window", type=int, default=64, help="what attention always sees"
    )
    parser.add_argument(
        "--near", type=int, default=24, help="... also of facts and answers"
    )
    parser.add_argument("--lr", type=float, default=2.5e-3)
    parser.add_argument("--warmup", type=int, default=200, help="steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=12, help="data processes")
    parser.add_argument("--log-every", type=int, default=100)
    parser.add_argument("--save-seconds", type=float, default=60.0)
    parser.add_argument(
        "--compile", action="store_true", help="torch.compile the layers"
    )
    parser.add_argument(
        "--graph", action="store_true", help="replay steps as a CUDA graph"
    )
    parser.add_argument("--machine", default="", help="for the record")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
