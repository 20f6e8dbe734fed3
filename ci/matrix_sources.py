# SPDX-License-Identifier: Apache-2.0
"""Where the source of an engine version comes from: installed, kept, or a wheel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory

from hybrid_plugin.upstream.matrix import Row

_PLATFORMS = ("manylinux_2_34_x86_64", "manylinux_2_28_x86_64")


class SourceError(RuntimeError):
    """A source that could not be had; the message says how to get it."""


def find(row: Row, folder: Path, *, offline: bool = False) -> Path:
    """The folder that holds the engine's package, in the row's version.

    Args:
        row: of the matrix.
        folder: where unpacked sources are kept, one folder a row.
        offline: use only what is installed or kept already.

    Raises:
        SourceError: if it is not there and cannot be downloaded.
    """
    installed = _installed(row)
    if installed is not None:
        return installed
    kept = folder / row.name
    if not kept.is_dir():
        if offline:
            raise SourceError(f"{row.name} is neither installed nor in {folder}.")
        with TemporaryDirectory() as downloads:
            _download(row, Path(downloads))
            _unpack(next(Path(downloads).glob("*.whl")), kept)
    return kept


def _installed(row: Row) -> Path | None:
    try:
        found = metadata.distribution(row.distribution)
    except metadata.PackageNotFoundError:
        return None
    if found.version.partition("+")[0] != row.version:
        return None
    root = Path(str(found.locate_file("")))
    return root if (root / row.engine).is_dir() else None


def _download(row: Row, folder: Path) -> None:
    command = [*_pip(), "download", "--no-deps", "--quiet", "--dest", str(folder)]
    command += ["--only-binary=:all:", f"--python-version={row.python}"]
    command += [f"--platform={platform}" for platform in _PLATFORMS]
    wanted = f"{row.distribution}=={row.version}"
    done = subprocess.run([*command, wanted], capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason was given"])[-1]
        raise SourceError(
            f"{wanted} could not be downloaded: {reason} Put its unpacked wheel into "
            f"build/matrix/{row.name}, or use --offline."
        )


def _pip() -> list[str]:
    """A pip: this interpreter's, or one that uv runs."""
    own = [sys.executable, "-m", "pip"]
    if subprocess.run([*own, "--version"], capture_output=True).returncode == 0:
        return own
    uv = shutil.which("uv") or "build/uv/bin/uv"
    if not os.access(uv, os.X_OK):
        raise SourceError("Downloads need pip or uv; install one of them.")
    return [uv, "tool", "run", "--quiet", "pip"]


def _unpack(wheel: Path, folder: Path) -> None:
    """Unpack the Python files: all that is looked at."""
    partly = folder.with_name(f"{folder.name}.partly")
    shutil.rmtree(partly, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if n.endswith((".py", "/METADATA"))]
        archive.extractall(partly, names)
    partly.rename(folder)
