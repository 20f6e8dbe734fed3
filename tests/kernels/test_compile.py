# SPDX-License-Identifier: Apache-2.0
"""Every Triton kernel compiles for Hopper and fits its shared memory; no GPU needed.

And its machine code reads no register that was never written, and all variants of a
step sum in one order.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compile_for_gpu.py")
SHAPES = {
    "bfloat16-128x128": "bfloat16 128 128 bare",
    "bfloat16-128x128-tables": "bfloat16 128 128 extra",
    "float16-64x256": "float16 64 256 extra",
}
if "HYBRID_TEST_ALL" in os.environ:  # three minutes, for operands that few models have
    SHAPES["float32-64x256"] = "float32 64 256 extra"


def run(folder: Path, script: Path, *words: str) -> str:
    """What a script prints, compiling into an empty cache."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("no triton")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, str(script), *words],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_kernels_compile(shape: str, tmp_path: Path) -> None:
    printed = run(tmp_path, SCRIPT, *shape.split())
    assert "_step_kernel" in printed
    assert "_commit_kernel" in printed
    assert "output_kernel read" in printed or "no disassembler" in printed
    # A layer that sums nothing would show that the layouts could not be read.
    assert re.search(r"^delta-.* [12] sums$", printed, re.MULTILINE)


def test_prefills_behind_decodes_compute_as_those_that_begin_a_pass(
    tmp_path: Path,
) -> None:
    printed = run(tmp_path, SCRIPT.with_name("compile_behind_decodes.py"))
    assert len(printed.splitlines()) == 5
