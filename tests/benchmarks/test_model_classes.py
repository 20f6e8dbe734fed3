# SPDX-License-Identifier: Apache-2.0
"""Model classes beside each other: which engines have which, and what is compared."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.model_classes import table
from benchmarks.model_shapes import (
    CLASSES,
    COMPARISONS,
    EAGER_BAMBA,
    EAGER_JAMBA,
    GRANITE,
    GRANITE_ALONE,
    JAMBA_ALONE,
    KEEPING_BAMBA,
    KEEPING_JAMBA,
    OUR_BAMBA,
    OUR_JAMBA,
    THEIR_JAMBA,
)

NAMES = {"architectures", "model_type", "rope_parameters"}
"""Not sizes."""
ROUND: dict[str, Any] = {
    "prompt_tokens": 100,
    "cached_tokens": 50,
    "ttft_ms_p50": 10.0,
    "ttft_ms_p95": 20.0,
    "request_ms_mean": 100.0,
    "tokens_per_s": 1000.0,
    "at_once": 1,
    "decoding": 1.0,
    "acceptance": None,
    "step_ms": 5.0,
    "failed": 0,
    "seed": 0,
}


@pytest.mark.parametrize(
    ("model", "engine", "sides"),
    [
        ("bamba", "vllm", (OUR_BAMBA, GRANITE, GRANITE_ALONE)),
        ("bamba", "sglang", (OUR_BAMBA, GRANITE, GRANITE_ALONE)),
        ("jamba", "vllm", (OUR_JAMBA, THEIR_JAMBA, JAMBA_ALONE)),
        ("jamba", "sglang", (OUR_JAMBA,)),
    ],
)
def test_engines_are_asked_for_classes_that_they_have(
    model: str, engine: str, sides: tuple[str, ...]
) -> None:
    assert COMPARISONS[model].sides(engine) == sides
    more = COMPARISONS[model].sides(engine, named=True)
    keeping = f"{sides[0]}, states kept inside passes"
    eager = [f"{keeping}, prompts without graphs"] if engine == "vllm" else []
    assert more == (*sides, keeping, *eager)


def test_our_kernels_are_asked_for_on_these_sides_alone() -> None:
    asked = {
        name for name, one in CLASSES.items() if one.options("vllm").get("kernels")
    }
    assert asked == {KEEPING_BAMBA, EAGER_BAMBA, KEEPING_JAMBA, EAGER_JAMBA}
    for name, graphs in ((KEEPING_JAMBA, True), (EAGER_JAMBA, False)):
        assert CLASSES[name].options("vllm") == {
            "kernels": "ours",
            "prefill_graphs": graphs,
            "models": ["JambaForCausalLM"],
        }
    assert CLASSES[KEEPING_BAMBA].options("sglang") == {"kernels": "ours"}


def test_sides_of_a_model_have_equal_sizes() -> None:
    for one in COMPARISONS.values():
        ours = CLASSES[one.ours].shape
        for other in one.compared:
            theirs = CLASSES[other].shape
            shared = ours.keys() & theirs.keys() - NAMES
            assert {k: ours[k] for k in shared} == {k: theirs[k] for k in shared}


def test_our_class_is_compared_with_each_that_ran() -> None:
    def of(step_ms: float) -> dict[str, Any]:
        return {"workloads": {"decode 1": [{**ROUND, "step_ms": step_ms}]}}

    results = {
        OUR_BAMBA: of(6.0),
        GRANITE: of(5.0),
        GRANITE_ALONE: {"failed": True},
        KEEPING_BAMBA: of(5.0),
        EAGER_BAMBA: of(10.0),
    }
    lines = list(table(results, ["chats", "decode 1"]))
    compared = lines[lines.index(next(li for li in lines if "Our class" in li)) + 3 :]
    ratio = "1.00x | 1.00x | 1.00x"
    assert compared == [
        f"| decode 1 | {OUR_BAMBA} | {GRANITE} | {ratio} | 1.20x |",
        f"| decode 1 | {OUR_BAMBA} | {KEEPING_BAMBA} | {ratio} | 1.20x |",
        f"| decode 1 | {OUR_BAMBA} | {EAGER_BAMBA} | {ratio} | 0.60x |",
        f"| decode 1 | {KEEPING_BAMBA} | {GRANITE} | {ratio} | 1.00x |",
        f"| decode 1 | {KEEPING_BAMBA} | {EAGER_BAMBA} | {ratio} | 0.50x |",
        f"| decode 1 | {EAGER_BAMBA} | {GRANITE} | {ratio} | 2.00x |",
        "\nThe first token of one prompt (`decode 1`):\n",
        "| side | TTFT p50 ms | TTFT p95 ms |",
        "|---|---|---|",
        *(
            f"| {side} | 10.0 | 20.0 |"
            for side in (OUR_BAMBA, GRANITE, KEEPING_BAMBA, EAGER_BAMBA)
        ),
        f"\n{GRANITE_ALONE}: its engine did not start.",
    ]
