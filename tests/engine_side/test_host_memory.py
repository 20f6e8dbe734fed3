# SPDX-License-Identifier: Apache-2.0
"""What a machine has free, and who is refused for want of it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from hybrid_plugin.config import ConfigError, HybridConfig
from hybrid_plugin.engine import host_memory
from hybrid_plugin.engine.host_memory import (
    check_packages,
    check_room,
    free_bytes,
    plan_tier,
    room_for,
)
from hybrid_plugin.sizes import Multiple
from tests.engine_side.test_cache_assembly import LAYOUT

GIB = 1 << 30


def machine(root: Path, available: int) -> Path:
    (root / "proc").mkdir()
    lines = f"MemTotal: {1 << 40} kB\nMemAvailable: {available >> 10} kB\n"
    (root / "proc/meminfo").write_text(lines)
    return root


def group(folder: Path, names: tuple[str, str], most: str, used: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{most}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon {used}\ninactive_file {GIB}\n")


def test_ranks_that_fit_are_served_to_the_byte() -> None:
    check_room(4 * GIB, 2, 8 * GIB)
    with pytest.raises(ConfigError) as refusal:
        check_room(4 * GIB, 2, 8 * GIB - 1)
    assert str(refusal.value) == (
        "host_memory of 4.00 GiB for each of 2 ranks is more than this machine has "
        "free, 8.00 GiB: lower it."
    )
    with pytest.raises(ConfigError, match=r"^host_memory of 4\.00 GiB is more than"):
        check_room(4 * GIB, 1, 3 * GIB)


@pytest.mark.parametrize(
    ("option", "room", "budget"),
    [
        (3 * GIB, GIB, 3 * GIB),
        ("3GiB", None, 3 * GIB),
        ("1.5x", None, 6 * GIB),
        ("1.5x", 7 * GIB, 6 * GIB),
        ("1.5x", 5 * GIB, 5 * GIB),
    ],
)
def test_a_multiple_is_lowered_to_what_there_is(
    option: int | str, room: int | None, budget: int
) -> None:
    options = HybridConfig.from_mapping({"host_memory": option})
    plan = plan_tier(LAYOUT, options, 4 * GIB, room)
    assert plan is not None
    assert plan.budget <= budget < plan.budget + plan.block_bytes


def test_room_is_asked_for_where_no_number_says_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_memory, "free_bytes", lambda: 40 * GIB)
    assert room_for(HybridConfig(host_memory=1), 2) is None
    assert room_for(HybridConfig(), 2) is None
    assert room_for(HybridConfig(host_memory=Multiple(2.0)), 2) == 16 * GIB
    check_room(Multiple(1e9), 1, 1)


def nothing_named_cuda(name: str) -> None:
    raise ModuleNotFoundError(f"No module named {name.partition('.')[0]!r}")


@pytest.mark.parametrize("find", [lambda name: None, nothing_named_cuda])
def test_a_gpu_needs_the_driver_s_bindings(
    find: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", find)
    some = HybridConfig(host_memory=GIB)
    for device in ("cuda", "cuda:1"):
        with pytest.raises(ConfigError) as refusal:
            check_packages(some, device)
    assert str(refusal.value) == (
        "host_memory needs the package cuda-bindings, by which a GPU's copies are "
        "ordered: pip install cuda-bindings, or leave host_memory out."
    )
    check_packages(some, "cpu")
    check_packages(HybridConfig(), "cuda")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    check_packages(some, "cuda")


def test_a_machine_without_groups(tmp_path: Path) -> None:
    assert free_bytes(machine(tmp_path, 5 * GIB)) == 5 * GIB


@pytest.mark.parametrize(
    ("folder", "names"),
    [
        ("sys/fs/cgroup", ("memory.max", "memory.current")),
        ("sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")),
    ],
    ids=["v2", "v1"],
)
def test_a_container_has_what_its_group_leaves(
    folder: str, names: tuple[str, str], tmp_path: Path
) -> None:
    root = machine(tmp_path, 20 * GIB)
    group(root / folder, names, str(8 * GIB), 3 * GIB)
    assert free_bytes(root) == 6 * GIB, "files that it read can be dropped"
    group(root / folder, names, str(80 * GIB), 3 * GIB)
    assert free_bytes(root) == 20 * GIB
    group(root / folder, names, "max", 3 * GIB)
    assert free_bytes(root) == 20 * GIB


def test_this_machine_has_some() -> None:
    assert free_bytes() > 1 << 20
