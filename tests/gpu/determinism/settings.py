# SPDX-License-Identifier: Apache-2.0
"""Settings of vLLM one after the other, to find which makes a crowd change bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.gpu.determinism.engine import GROUPS
from tests.gpu.determinism.record import Answer, Difference, differences, load


@dataclass(frozen=True)
class Setting:
    """A few of vLLM's arguments beside those that all settings share."""

    name: str
    flags: Mapping[str, Any]


def _graphs(mode: str, *sizes: int) -> dict[str, Any]:
    """CUDA graphs of a mode; of those sizes, or of vLLM's own."""
    chosen = {"cudagraph_capture_sizes": list(sizes)} if sizes else {}
    return {"compilation_config": {"cudagraph_mode": mode, **chosen}}


SETTINGS = (
    Setting("enforce_eager", {"enforce_eager": True}),
    Setting("NONE", _graphs("NONE")),
    Setting("PIECEWISE", _graphs("PIECEWISE")),
    Setting("FULL_DECODE_ONLY", _graphs("FULL_DECODE_ONLY")),
    Setting("FULL_AND_PIECEWISE", _graphs("FULL_AND_PIECEWISE")),
    Setting("powers_of_two", _graphs("FULL_AND_PIECEWISE", *(2**n for n in range(7)))),
    # A sequence alone decodes in the graph that a crowd decodes in.
    Setting("one_size", _graphs("FULL_DECODE_ONLY", 32)),
    # What differs here is the cache's doing: nothing shares a pass.
    Setting("one_sequence", {"max_num_seqs": 1}),
    Setting("sync_scheduling", {"async_scheduling": False}),
)
BASE = "alone"
MODES = (BASE, "warm", "crowd", *GROUPS)
"""What is done under each setting."""


def report(folder: Path, first: Path | None) -> tuple[str, int]:
    """A line about a setting, and how many comparisons find a difference.

    Args:
        folder: its answers, a file for each of `MODES`; its name is the setting's.
        first: those of another setting, whose answers alone are compared too.
    """
    base = _load(folder, BASE)
    others = {mode: _load(folder, mode) for mode in MODES[1:]}
    if first is not None:
        others[f"{BASE} beside {first.name}"] = _load(first, BASE)
    found = {name: differences(base, other) for name, other in others.items()}
    parts = [f"{name} {_told(each)}" for name, each in found.items()]
    line = f"{folder.name}: of {len(base)} differ: {'; '.join(parts)}"
    return line, sum(map(bool, found.values()))


def _load(folder: Path, mode: str) -> list[Answer]:
    """Of the one process that asked in this mode."""
    (path,) = folder.glob(f"chunk-*-{mode}.npz")
    return load(path)


def _told(found: Sequence[Difference]) -> str:
    """How many differ, from which tokens on, and how far."""
    if not found:
        return "0"
    first = Counter(one.position for one in found)
    tokens = ", ".join(f"{first[at]} at token {at}" for at in sorted(first)[:3])
    largest = max(one.largest for one in found)
    return f"{len(found)} ({tokens}{', ...' * (len(first) > 3)}; {largest:.2g} nats)"
