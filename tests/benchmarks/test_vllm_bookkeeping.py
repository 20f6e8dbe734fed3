# SPDX-License-Identifier: Apache-2.0
"""vLLM without a model restores what it restored on a GPU."""

from __future__ import annotations

import argparse

import pytest

pytest.importorskip("vllm")

from benchmarks.prefix_models import write_model
from benchmarks.vllm_bookkeeping import SCRATCH, rows_of, table

WORKLOADS = ["system prompt of 200", "branches"]


@pytest.mark.parametrize(
    ("name", "restored"),
    [
        # As on an H200: benchmarks/results/vllm-prefix-qwen3-next.md.
        ("stock, default", (0.0, 0.786)),
        # Pages of 32 tokens, and positions in prompts that are learned.
        ("plugin", (0.54, 0.77)),
    ],
)
def test_hits_are_those_of_a_gpu(name: str, restored: tuple[float, float]) -> None:
    write_model("qwen3-next", SCRATCH / "qwen3-next")
    args = argparse.Namespace(cache_gib=8, rounds=1, workloads=WORKLOADS)
    rows = rows_of(name, "qwen3-next", args)
    assert [row["workload"] for row in rows] == WORKLOADS
    assert [row["restored"] for row in rows] == pytest.approx(restored, abs=0.05)
    assert all(row["steps"] > 24 for row in rows)
    assert name in table(rows)
