# SPDX-License-Identifier: Apache-2.0
"""Host memory in which an engine keeps content: how it is cut, and whether it is free.

It is pinned: the kernel cannot page it out, so a machine whose memory it takes stalls
or ends processes.  What is free is therefore asked for before.  The limit of locked
memory (`ulimit -l`) is not asked for: drivers pin pages without counting them there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from hybrid_plugin.config import ConfigError, HybridConfig
from hybrid_plugin.core.commands import Pool
from hybrid_plugin.core.memory.layout import CacheLayout, TooLittleMemoryError
from hybrid_plugin.core.tiers.host_plan import HostPlan, plan_host, rows_of
from hybrid_plugin.engine import driver_bindings
from hybrid_plugin.sizes import Multiple, gib

_GROUPS = (
    ("sys/fs/cgroup", "memory.max", "memory.current"),
    ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)
"""Where a container's limit and use are, in the two versions of control groups."""


def plan_tier(
    layout: CacheLayout,
    options: HybridConfig,
    device_bytes: int,
    room: int | None = None,
) -> HostPlan | None:
    """How the host memory of a rank is cut; None where the options give none.

    Args:
        layout: of the device's pools.
        options: of the plugin.
        device_bytes: of these pools, together.
        room: bytes to which a multiple of them is lowered; None for no bound.

    Raises:
        ConfigError: if it holds nothing, or the model has no layers with full
            attention, or none besides.
    """
    wanted = options.host_memory
    if wanted is None:
        return None
    if isinstance(wanted, Multiple):
        wanted = int(wanted.factor * device_bytes)
        wanted = wanted if room is None else min(wanted, room)
    if not layout.states and not layout.attention_windows:
        raise ConfigError(
            "host_memory needs a model with state layers or attention windows: leave "
            "it out."
        )
    try:
        return plan_host(rows_of(layout), wanted)
    except TooLittleMemoryError as error:
        raise ConfigError(f"host_memory is too little: {error}; raise it.") from error
    except ValueError as error:
        raise ConfigError(
            f"host_memory cannot be used: {error}; leave it out."
        ) from error


def describe(plan: HostPlan, page_size: int) -> str:
    """The plan in one line, for the log.

    Args:
        plan: of a rank.
        page_size: tokens in a page.
    """
    rows = ", ".join(
        f"{plan.rows_per_block(pool)} {Pool.noun(pool)} of {pool}"
        for pool in plan.row_bytes
    )
    return (
        f"hybrid-plugin keeps what the device evicts in {gib(plan.budget)} of host "
        f"memory on each rank, the KV of {plan.rows(Pool.KV) * page_size} tokens at "
        f"most: each block of {gib(plan.block_bytes)} holds {rows}"
    )


def check_packages(options: HybridConfig, device: str) -> None:
    """Check that this machine can order copies to host memory, if there is to be some.

    Workers find out only once they have loaded the model.

    Args:
        options: of the plugin.
        device: that the ranks compute on, as torch calls it: "cpu", "cuda", "cuda:1".

    Raises:
        ConfigError: naming the package that is missing.
    """
    if options.host_memory is None or not device.startswith("cuda"):
        return
    if not driver_bindings.are_installed():
        raise ConfigError(
            "host_memory needs the package cuda-bindings, by which a GPU's copies are "
            "ordered: pip install cuda-bindings, or leave host_memory out."
        )


def check_room(wanted: int | Multiple, ranks: int, free: int) -> None:
    """Check that so many ranks can take so much memory each.

    Args:
        wanted: bytes for each; a multiple of the device's is lowered when it is known.
        ranks: of the engine on this machine.
        free: bytes that the machine has for them.

    Raises:
        ConfigError: if it has less.
    """
    if isinstance(wanted, Multiple):
        return
    if wanted * ranks > free:
        each = "" if ranks == 1 else f" for each of {ranks} ranks"
        raise ConfigError(
            f"host_memory of {gib(wanted)}{each} is more than this machine has free, "
            f"{gib(free)}: lower it."
        )


def room_for(options: HybridConfig, ranks: int) -> int | None:
    """Bytes that each of so many ranks may take, if the options name no number.

    What else the machine does keeps a fifth of what is free, as in SGLang's cache.

    Args:
        options: of the plugin.
        ranks: of the engine on this machine.
    """
    if not isinstance(options.host_memory, Multiple):
        return None
    return free_bytes() * 4 // 5 // ranks


def free_bytes(root: Path = Path("/")) -> int:
    """Bytes that processes here can still take, without what the kernel can drop.

    Args:
        root: of the file system in which Linux says it.
    """
    return min([_of_machine(root), *_of_groups(root)])


def _of_machine(root: Path) -> int:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(fields["MemAvailable"].split()[0]) << 10


def _of_groups(root: Path) -> Iterator[int]:
    for folder, limit, used in _GROUPS:
        try:
            most = int((root / folder / limit).read_text())
            taken = int((root / folder / used).read_text())
            statistics = (root / folder / "memory.stat").read_text().splitlines()
        except (OSError, ValueError):  # no such group, or "max"
            continue
        known = dict(line.split() for line in statistics)
        # What was read from files is dropped before anything fails.
        yield most - taken + int(known.get("inactive_file", 0))
