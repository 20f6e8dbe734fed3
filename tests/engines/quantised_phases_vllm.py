# SPDX-License-Identifier: Apache-2.0
"""Serves one of our classes by vLLM from a W8A8 checkpoint; prints what came out.

python -m tests.engines.quantised_phases_vllm KIND FOLDER RANKS

Right answers are those of transformers with the same rounded weights, whose linear
layers round their tokens, too.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from tests.engines.changed_checkpoints import round_inputs, write_quantised
from tests.engines.model_phases_vllm import VllmEngine, options, set_environment
from tests.engines.model_workload import ANSWER, Tokens, gap, zeroed_snapshots
from tests.engines.phases import report
from tests.models.kinds import find, logits_of, network

PROMPTS = ((3, 150), (60, 97))
"""First token and length of each; one is longer than a step."""


def main(name: str, folder: Path, ranks: int) -> None:
    """Print one line of JSON."""
    kind = find(name)
    checkpoint = kind.write(folder / "base")
    modules = write_quantised(checkpoint, folder / "int8", folder / "rounded")
    model = network(kind.architecture, folder / "rounded")
    round_inputs(model, modules)
    reference = logits_of(model)
    engine = VllmEngine(
        folder / "int8",
        tensor_parallel_size=ranks,
        additional_config={"hybrid_plugin": options(kind)},
    )
    first = [list(range(start, start + length)) for start, length in PROMPTS]
    found: dict[str, Any] = {"gaps": {}, "cached": {}, "model": engine.model}
    found["kernels"] = engine.kinds_of_linear_layers()

    def ask(phase: str, prompts: Tokens) -> Tokens:
        answers, found["cached"][phase] = engine.ask(prompts, ANSWER)
        pairs = zip(prompts, answers, strict=True)
        found["gaps"][phase] = max(gap(reference, *pair) for pair in pairs)
        return answers

    answers = ask("first", first)
    second = [p + a + [7] * 20 for p, a in zip(first, answers, strict=True)]
    ask("second", second)
    with zeroed_snapshots():
        ask("zeroed", [p + [9] * 20 for p in second])
    report(found)


def use_no_amx() -> None:
    """With it, vLLM takes W8A8 to a kernel without float32; workers are forked."""
    torch.cpu._is_amx_tile_supported = lambda: False


if __name__ == "__main__":
    set_environment()
    use_no_amx()
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
