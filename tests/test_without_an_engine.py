# SPDX-License-Identifier: Apache-2.0
"""What needs no engine runs where there is neither an engine nor PyTorch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.plan.configs import QWEN3_NEXT, write

ROOT = Path(__file__).parents[1]
ABSENT = ("torch", "triton", "vllm", "sglang", "transformers", "prometheus_client")
ALONE = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {ABSENT!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
from hybrid_plugin.cli import main
sys.exit(main(sys.argv[1:]))
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    places = (ROOT, ROOT / "kernels", ROOT / "model_registry")
    return subprocess.run(
        [sys.executable, "-c", ALONE, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places))},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    "command",
    [
        *("bundle", "demo", "doctor", "models", "plan", "route", "session", "simulate"),
        "top",
    ],
)
def test_every_command_says_what_it_takes(command: str) -> None:
    found = run(command, "--help")
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith(f"usage: hybrid-plugin {command}")


def test_plans_need_no_engine(tmp_path: Path) -> None:
    config = str(write(tmp_path, QWEN3_NEXT))
    memory = ("--gpu-memory", "80GB", "--weights", "40GB")
    found = run("plan", "--model-config", config, *memory)
    assert found.returncode == 0, found.stderr
    assert "sequences" in found.stdout


def test_simulations_need_no_engine(tmp_path: Path) -> None:
    memory = ("--gpu-memory", "4GB", "--weights", "1GB")
    config = str(write(tmp_path, QWEN3_NEXT))
    flags = ("--format", "agentic", "--requests", "20", *memory)
    found = run("simulate", "--model-config", config, *flags)
    assert found.returncode == 0, found.stderr
    assert "hit rate" in found.stdout


def test_files_are_looked_after_without_an_engine(tmp_path: Path) -> None:
    found = run("bundle", "verify", str(tmp_path))
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout == "0 of 0 bundles are in order.\n"
    assert run("session", "ls", "--folder", str(tmp_path)).returncode == 0
