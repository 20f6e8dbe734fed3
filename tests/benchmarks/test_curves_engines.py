# SPDX-License-Identifier: Apache-2.0
"""The engines' own caches in the curves: their shapes, and hits as on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from benchmarks.curves import sglang_side, vllm_side
from benchmarks.curves.sglang_models import REPLICAS, scale
from benchmarks.curves.shapes import SHAPES, STATE_ITEMSIZE, Task
from benchmarks.curves.sides import Side, run_side
from benchmarks.prefix_models import MODELS, slot_bytes, token_bytes
from benchmarks.vllm_bookkeeping import GPU_BLOCKS

GIB = 1 << 30
needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM's environment")
needs_sglang = pytest.mark.skipif(
    find_spec("sglang") is None, reason="SGLang's environment"
)


def test_blocks_are_those_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for shape in ("qwen3-next", "nemotron-h-8b"):
        assert vllm_side.gpu_block(shape) == GPU_BLOCKS[shape]
    monkeypatch.setitem(STATE_ITEMSIZE, "qwen3.5-4b", 4)
    assert vllm_side.gpu_block("qwen3.5-4b") == GPU_BLOCKS["qwen3.5-4b"]


@pytest.mark.parametrize("shape", SHAPES)
def test_replicas_have_the_proportions_of_the_real_shape(
    shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = MODELS[shape] | REPLICAS[shape][1]
    monkeypatch.setitem(MODELS, "replica", replica)
    size = STATE_ITEMSIZE[shape]
    assert Fraction(token_bytes("replica"), token_bytes(shape)) == scale(shape)
    states = Fraction(slot_bytes("replica", size), slot_bytes(shape, size))
    assert states == scale(shape)


def test_falcon_h1_has_the_published_states() -> None:
    # 24 heads of 128 x 256 in float32, and 3 columns of 3,584 channels, 44 times.
    assert slot_bytes("falcon-h1-7b") == 44 * (4 * 24 * 128 * 256 + 2 * 3 * 3584)
    assert token_bytes("falcon-h1-7b") == 44 * 2 * 2 * 2 * 128


def served(name: str, module: str, caches: list[str]) -> list[dict[str, Any]]:
    side = Side(name, Path(sys.executable), module)
    tasks = [Task("qwen3-next", "few-shot", 0, None, 4 * GIB, 2048, c) for c in caches]
    rows: list[dict[str, Any]] = []
    run_side(side, tasks, {}, rows.append)
    assert [row.get("failed") for row in rows] == [None] * len(caches)
    return rows


@needs_vllm
def test_vllm_serves_every_request_with_its_answer() -> None:
    caches = ["vllm", "vllm, unit 16, dense"]
    for row in served("vllm", "benchmarks.curves.vllm_side", caches):
        assert row["requests"] == 120
        assert 0.2 < row["restored"] < 0.5


@needs_sglang
def test_sglang_serves_every_request_with_its_answer() -> None:
    caches = list(sglang_side.CACHES)
    rows = served("sglang", "benchmarks.curves.sglang_side", caches)
    assert all(row["requests"] == 120 for row in rows)
    assert all(0.3 < row["restored"] < 0.5 for row in rows)
    assert len({row["cached_tokens"] for row in rows}) > 2, "settings that differ"


SERVE = """
import random, sys
from pathlib import Path
from benchmarks.curves.sglang_models import scale, write_replica
from benchmarks.no_model.sglang_engine import SteppedScheduler
from benchmarks.prefix_workloads import WORKLOADS
from benchmarks.sglang_prefix import configurations

folder, shape, setting, gib, workload = sys.argv[1:]
write_replica(shape, Path(folder), 8192)
arguments = dict(
    model_path=folder, load_format="dummy", skip_tokenizer_init=True,
    dtype="bfloat16", context_length=8192, max_running_requests=64,
    chunked_prefill_size=8192, attention_backend="triton", log_level="error",
    sampling_backend="pytorch", disable_flashinfer_autotune=True,
    mamba_ssm_dtype="float32",
) | configurations(shape)[setting]
engine = SteppedScheduler(arguments, int((int(gib) << 30) * scale(shape)))
rng = random.Random(0)

async def ask(prompt, length):
    return await engine.ask(prompt, length, rng.choices(range(10, 9999), k=length))

replies = engine.drive(WORKLOADS[workload](ask, random.Random(0)))
cached = sum(r.cached_tokens for r in replies)
print("SHARE", cached / sum(r.prompt_tokens for r in replies))
"""


@needs_sglang
@pytest.mark.parametrize(
    ("shape", "setting", "gib", "workload", "share"),
    [
        # As on an H200: benchmarks/results/sglang-prefix-*.md.
        ("qwen3-next", "stock, default", "8", "chats", 0.719),
        ("nemotron-h-8b", "stock, unified memory", "10", "chats", 0.729),
    ],
)
def test_hits_of_sglang_are_those_of_a_gpu(
    tmp_path: Path, shape: str, setting: str, gib: str, workload: str, share: float
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SERVE, str(tmp_path), shape, setting, gib, workload],
        env=os.environ | {"HYBRID_PLUGIN": "0", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    (line,) = (x for x in done.stdout.splitlines() if x.startswith("SHARE "))
    assert float(line.removeprefix("SHARE ")) == pytest.approx(share, abs=0.03)
