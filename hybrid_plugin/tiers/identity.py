# SPDX-License-Identifier: Apache-2.0
"""What must be equal for two processes to mean the same by the same tokens."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

FORMAT = "hybrid-bundle/1"
"""Name and version of the files' format; part of every fingerprint."""

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


@dataclass(frozen=True, slots=True)
class Identity:
    """The meaning of KV and states.

    How their bytes lie is not part of it: layouts are converted.
    """

    weights: str
    """Which weights: `weights_of`, or a name for which the user answers."""
    config: str
    """`config_digest` of the model's configuration as the engine uses it, with rope
    scaling and whatever was overridden."""
    layers: tuple[str, ...]
    """Each layer of the model that keeps something, with its kind and how far back it
    sees, such as `"3 full attention"`."""
    kv_dtype: str
    """Element type of KV, and where it is quantised, by what scales."""
    tensor_rank: int = 0
    tensor_ranks: int = 1
    pipeline_rank: int = 0
    pipeline_ranks: int = 1
    update: str = ""
    """Empty for the weights as they were loaded.  After an update of weights in memory
    a random value, equal on all ranks: a restart has no such weights."""

    def fingerprint(self) -> str:
        """SHA-256 in hexadecimal digits, equal on all ranks of a model replica.

        So a bundle has one key, and each rank has its part of it.
        """
        fields = {"format": FORMAT, **asdict(self)}
        del fields["tensor_rank"], fields["pipeline_rank"]
        return sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()

    @property
    def rank_name(self) -> str:
        """Name of this rank, in its folder and in its bundles."""
        rank = self.pipeline_rank * self.tensor_ranks + self.tensor_rank
        return f"rank-{rank}-of-{self.pipeline_ranks * self.tensor_ranks}"


def config_digest(config: Mapping[str, Any]) -> str:
    """SHA-256 of a model's configuration, in hexadecimal digits.

    Args:
        config: what can be written as JSON; other values count by their `repr`.
    """
    return sha256(json.dumps(config, sort_keys=True, default=repr).encode()).hexdigest()


def weights_of(folder: Path) -> str:
    """A name for the weights in a folder, without reading them.

    It changes with the name, size and time of change of any file of weights.  Where a
    hub's cache links to files that it names after their content, those names count and
    the time does not.

    Raises:
        FileNotFoundError: if there are no weights.
    """
    files = sorted(file for file in folder.iterdir() if file.suffix in _WEIGHTS)
    if not files:
        raise FileNotFoundError(f"no weights in {folder}")
    digest = sha256()
    for file in files:
        digest.update(json.dumps([file.name, *_version(file)]).encode())
    return digest.hexdigest()


def _version(file: Path) -> tuple[object, ...]:
    status = file.stat()
    if file.is_symlink():
        name = os.path.basename(os.path.realpath(file))
        if len(name) == 64 and set(name) <= set("0123456789abcdef"):
            return status.st_size, name
    return status.st_size, status.st_mtime_ns
