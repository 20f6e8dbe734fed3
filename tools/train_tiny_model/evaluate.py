# SPDX-License-Identifier: Apache-2.0
"""Check a checkpoint with transformers: recall intact, and with the states zeroed.

    python tools/train_tiny_model/evaluate.py tests/assets/tiny-qwen3-next

Every question is asked twice. The prompt is run up to a point between the
facts and the question; then the key-value cache is kept, and the gated delta
net's convolution and recurrent states are kept (intact) or zeroed (the
negative control); then the rest is run and the answer decoded greedily. The
numbers go into `training.json` of the folder.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from checkpoint import write_json
from data import Probe, load_corpus, probes
from transformers import AutoModelForCausalLM, DynamicCache

RANGES = ((50, 200), (200, 500), (500, 1000), (1000, 1500))


def zero_states(cache: Any) -> None:
    """Zero what the state layers remember; attention layers keep theirs."""
    for layer in cache.layers:
        for name in ("conv_states", "recurrent_states"):
            held = getattr(layer, name, None)
            if held is not None:
                for state in held.values() if isinstance(held, dict) else held:
                    state.zero_()


@torch.no_grad()
def answer(model: Any, probe: Probe, count: int, zeroed: bool) -> list[int]:
    """Decode `count` tokens greedily after the probe."""
    cache = DynamicCache(config=model.config)
    prompt = torch.tensor([probe.tokens])
    model(prompt[:, : probe.cut], past_key_values=cache)
    if zeroed:
        zero_states(cache)
    said: list[int] = []
    feed = prompt[:, probe.cut :]
    for _ in range(count):
        logits = model(feed, past_key_values=cache).logits[0, -1]
        said.append(int(logits.argmax()))
        feed = torch.tensor([said[-1:]])
    return said


def measure(model: Any, text: str, count: int) -> dict[str, Any]:
    """Recall by distance, intact and zeroed, and how many continuations differ."""
    result: dict[str, Any] = {}
    for low, high in RANGES:
        intact = zeroed = differ = 0
        for probe in probes(text, 99, count, low, high):
            wanted = list(probe.answer.encode())
            first = answer(model, probe, 16, zeroed=False)
            second = answer(model, probe, 16, zeroed=True)
            intact += first[: len(wanted)] == wanted
            zeroed += second[: len(wanted)] == wanted
            differ += first != second
        result[f"{low}-{high}"] = {
            "recall_intact": round(intact / count, 4),
            "recall_states_zeroed": round(zeroed / count, 4),
            "continuations_that_differ": round(differ / count, 4),
        }
        print(low, high, result[f"{low}-{high}"], flush=True)
    return result


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Recall with and without the states.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=50, help="questions per distance")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    torch.set_num_threads(
        1
    )  # decoding this small a model does not get faster with more
    model = AutoModelForCausalLM.from_pretrained(
        args.folder, dtype=getattr(torch, args.dtype)
    )
    result = measure(model, load_corpus().held_out, args.count)
    path = args.folder / "training.json"
    record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    record.setdefault("negative_control", {})[args.dtype] = {
        "questions_per_distance": args.count,
        "by_distance": result,
    }
    write_json(path, record)


if __name__ == "__main__":
    main()
