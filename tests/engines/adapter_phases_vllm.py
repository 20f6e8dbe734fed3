# SPDX-License-Identifier: Apache-2.0
"""Serves one of our classes by vLLM with a LoRA adapter; prints what came out.

python -m tests.engines.adapter_phases_vllm KIND FOLDER RANKS

The adapter changes every linear layer of the checkpoint, and right answers are those of
a checkpoint whose weights have it added.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.engines.changed_checkpoints import write_adapter
from tests.engines.model_phases_vllm import VllmEngine, options, set_environment
from tests.engines.model_workload import ANSWER, Tokens, gap, zeroed_snapshots
from tests.engines.phases import report
from tests.models.kinds import find

PROMPTS = ((3, 150), (60, 97))
"""First token and length of each; one is longer than a step."""
_PLACES = 2
"""For adapters.  vLLM's CPU build gives requests without one what is in the last."""


def main(name: str, folder: Path, ranks: int) -> None:
    """Print one line of JSON."""
    from vllm.lora.request import LoRARequest

    kind = find(name)
    checkpoint = kind.write(folder / "base")
    write_adapter(checkpoint, folder / "adapter", folder / "merged")
    engine = VllmEngine(
        checkpoint,
        tensor_parallel_size=ranks,
        enable_lora=True,
        max_loras=_PLACES,
        max_lora_rank=8,
        additional_config={"hybrid_plugin": options(kind)},
    )
    adapter = LoRARequest("random", 1, str(folder / "adapter"))
    first = [list(range(start, start + length)) for start, length in PROMPTS]
    gaps: dict[str, float] = {}
    cached: dict[str, list[int]] = {}
    references = {
        "merged": kind.reference(folder / "merged"),
        "base": kind.reference(checkpoint),
    }

    def ask(phase: str, prompts: Tokens, given: LoRARequest | None) -> Tokens:
        answers, cached[phase] = engine.ask(prompts, ANSWER, given)
        for title, reference in references.items():
            gaps[f"{phase}, {title}"] = max(
                gap(reference, *pair) for pair in zip(prompts, answers, strict=True)
            )
        return answers

    answers = ask("first", first, adapter)
    second = [p + a + [7] * 20 for p, a in zip(first, answers, strict=True)]
    ask("second", second, adapter)
    ask("without", first, None)
    with zeroed_snapshots():
        ask("zeroed", [p + [9] * 20 for p in second], adapter)
    report({"gaps": gaps, "cached": cached, "model": engine.model})


if __name__ == "__main__":
    set_environment()
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
