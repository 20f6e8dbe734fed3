# SPDX-License-Identifier: Apache-2.0
"""Faults that tests plant into server processes, through PYTHONPATH.

A test that must fail when the cache is wrong proves it by failing under
`zero_snapshots`, or, where drafts are verified, under `wrong_column` (vLLM) or
`wrong_drafts` (SGLang), where turns end on the state after another draft than the last
accepted one; a server that must refuse to run half-patched proves it under
`exclude_workers`.
Under `grid_of_16` deterministic prompts are split, and resumed, at multiples of 16
tokens instead of 64, which must move their bits.
Under `zero_restored_states` what comes from host memory has no state, and under
`slow_restores` it takes seconds to come, while others decode.
Under `slow_prefills` computing seems to take longer than any read, and under
`fast_prefills` no time at all: what a peer has is always, or never, read.
Under `patient_with_stores` what a store has is always read, however slowly it answers.
Under `short_prefills_are_ours` our kernels run passes of few tokens, and those that
keep states, as they do beside a library that is faster for long ones.
Under `experts_by_rank` vLLM's experts on a CPU leave out those of other ranks, which it
takes for its own by default, and reads weights that are not there.
Under `refuse_pages` an engine preempts, however slowly requests arrive, because a
sequence that grows gets no page now and then.

HYBRID_TEST_ORACLE lets SGLang find the plugin whose drafts are as right as wanted, by
the metadata beside this file.

HYBRID_TEST_POOLS has pools of an exact size, for tests that count what is evicted; for
users there is memory to divide.

HYBRID_TEST_MOST_LIVE names a file that is to hold the most sequences that were live at
once: whoever asks for metrics now and then may miss them.
"""

import os
import sys
import time


def _zero_snapshots() -> None:
    from hybrid_plugin.core.cache import HybridCache
    from hybrid_plugin.core.commands import Copy, Pool, Zero

    drain = HybridCache.drain_commands

    def forgetful(self):  # type: ignore[no-untyped-def]
        return [
            Zero(Pool.STATE, c.destination)
            if isinstance(c, Copy) and c.pool is Pool.STATE
            else c
            for c in drain(self)
        ]

    HybridCache.drain_commands = forgetful  # type: ignore[method-assign]


def _grid_of_16() -> None:
    """Prompts are cut inside the kernels' chunks; states lie there after a pause."""
    from math import lcm

    from hybrid_plugin.core.policy.snapshot_positions import SnapshotPolicy

    def step(self) -> int:  # type: ignore[no-untyped-def]
        found = lcm(self.page_size, 16 if self.canonical else self.grid or 1)
        whole = lcm(self.page_size, self.grid or 1)
        assert found < whole or not self.canonical, "pages are as long as chunks"
        return found

    def is_interior(self, position: int) -> bool:  # type: ignore[no-untyped-def]
        # A pass can keep a state where a chunk of the kernels ends, and nowhere else.
        return self.grid > 0 and position % lcm(self.page_size, self.grid) == 0

    SnapshotPolicy.step = property(step)  # type: ignore[method-assign,assignment]
    SnapshotPolicy.is_interior = is_interior  # type: ignore[method-assign]


def _refuse_pages() -> None:
    from itertools import count

    from hybrid_plugin.core.cache import HybridCache

    grow, calls = HybridCache.grow, count(1)

    def seldom(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        return grow(self, *args, **kwargs) if next(calls) % 97 else None

    HybridCache.grow = seldom  # type: ignore[method-assign]


def _experts_by_rank() -> None:
    """An expert of another rank counts as the first one here, with a weight of zero."""
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    apply = cpu_moe.CPUUnquantizedExperts.apply

    def of_this_rank(self, **given):  # type: ignore[no-untyped-def]
        chosen, places = given["topk_ids"], given["expert_map"]
        if places is not None:
            here = places[chosen.long()].to(chosen.dtype)
            weights = given["topk_weights"].masked_fill(here < 0, 0)
            given |= {"topk_ids": here.clamp(min=0), "topk_weights": weights}
        return apply(self, **given)

    cpu_moe.CPUUnquantizedExperts.apply = of_this_rank


def _short_prefills_are_ours() -> None:
    """As if the engine had a library that is faster for all but short prefills."""
    from hybrid_plugin.engine import kernel_choice
    from hybrid_plugin.engine.kernel_choice import EVERY, Phase

    def reach(option, mixer, phase, device_type, theirs) -> int:  # type: ignore[no-untyped-def]
        return 40 if phase is Phase.PREFILL else EVERY

    kernel_choice.reach = reach  # type: ignore[assignment]
    # A fork server may have imported those that ask.
    for name in (
        "hybrid_plugin.vllm.kernels.layers",
        "hybrid_plugin.sglang.kernels.state_layers",
    ):
        if name in sys.modules:
            sys.modules[name].reach = reach  # type: ignore[attr-defined]


def _wrong_drafts() -> None:
    """Turns end with the state after another draft than the last accepted one."""
    from dataclasses import replace

    from hybrid_plugin.core.commands import Take
    from hybrid_plugin.sglang.speculation.replay.scratch import ReplayScratch
    from hybrid_plugin.sglang.speculation.scratch import DraftScratch

    def next_of(commands):  # type: ignore[no-untyped-def]
        return [replace(one, step=one.step + 1) for one in commands]

    take, cut = DraftScratch.take, ReplayScratch._cut

    def wrongly(self, commands: list[Take]) -> None:  # type: ignore[no-untyped-def]
        take(self, next_of(commands))

    def wrong_cut(self, verified, takes, ended):  # type: ignore[no-untyped-def]
        cut(self, verified, next_of(takes), ended)

    DraftScratch.take = wrongly  # type: ignore[method-assign]
    ReplayScratch._cut = wrong_cut  # type: ignore[method-assign]


def _zero_restored_states() -> None:
    """States that come from host memory are zeros once they are there."""
    from hybrid_plugin.core.cache import HybridCache
    from hybrid_plugin.core.commands import Await, Load, Pool, Zero

    drain = HybridCache.drain_commands
    slots: dict[int, tuple[int, ...]] = {}

    def forgetful(self):  # type: ignore[no-untyped-def]
        commands = []
        for command in drain(self):
            commands.append(command)
            if isinstance(command, Load) and command.pool == Pool.STATE:
                slots[command.ticket] = command.destinations
            elif isinstance(command, Await):
                loaded = slots.pop(command.ticket)
                commands += [Zero(Pool.STATE, slot) for slot in loaded]
        return commands

    HybridCache.drain_commands = forgetful  # type: ignore[method-assign]


def _slow_restores() -> None:
    """Loads seem to take seconds, and prefills longer; steps take a moment, so that on
    any machine a long answer lasts for several loads."""
    from hybrid_plugin.core.cache import HybridCache
    from hybrid_plugin.core.tiers.restores import TransferRates

    def repays(self, size: int, *_: object) -> bool:  # type: ignore[no-untyped-def]
        self.load_bytes_per_second = size / 3.0
        return True

    drain = HybridCache.drain_commands

    def slow(self):  # type: ignore[no-untyped-def]
        time.sleep(0.02)
        return drain(self)

    TransferRates.repays = repays  # type: ignore[method-assign]
    HybridCache.drain_commands = slow  # type: ignore[method-assign]


def _prefills_of(seconds: float) -> None:
    from hybrid_plugin.engine.prefill_time import PrefillTime
    from hybrid_plugin.tiers.peers.tier import PeerTier

    PrefillTime.token_seconds = property(lambda _: seconds)  # type: ignore[assignment]
    PeerTier.token_seconds = lambda *_: None  # type: ignore[method-assign]


def _patient_with_stores() -> None:
    from hybrid_plugin.engine.store import Store

    _prefills_of(10.0)
    Store.patience = 60.0


def _exclude_workers() -> None:
    if any("multiprocessing" in word for word in sys.orig_argv):
        os.environ["VLLM_PLUGINS"] = ""
        os.environ["SGLANG_PLUGINS"] = "hybrid_cpu"  # the platform alone


def _wrong_column() -> None:
    """Turns keep the state before accepted drafts, or behind one that nobody accepted.

    The latter where a step ahead began at the turn's end, as asynchronous ones do.
    """
    from dataclasses import replace

    from hybrid_plugin.core.verification import Verification

    end = Verification.end

    def before(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        found = end(self, *args, **kwargs)
        if found.column:
            return replace(found, column=0)
        ahead = self.in_flight and self.in_flight[0].drafts
        return replace(found, column=1) if found.column == 0 and ahead else found

    Verification.end = before  # type: ignore[method-assign]


def _fix_pools(pages: int, slots: int) -> None:
    from hybrid_plugin.core.memory.layout import CacheLayout, PoolSizes

    split = CacheLayout.split

    def exactly(self, budget, **options):  # type: ignore[no-untyped-def]
        split(self, budget, **options)  # refuses what it refuses without us
        sizes = PoolSizes(pages, slots)
        assert self.bytes_of(sizes) <= budget, "the test's pools do not fit"
        return sizes

    CacheLayout.split = exactly  # type: ignore[method-assign]


def _count_live(path: str) -> None:
    from hybrid_plugin.core.cache import HybridCache

    admit, most = HybridCache.admit, 0

    def counted(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        nonlocal most
        found = admit(self, *args, **kwargs)
        if self.live > most:
            most = self.live
            with open(path, "w") as file:
                file.write(str(most))
        return found

    HybridCache.admit = counted  # type: ignore[method-assign]


if "HYBRID_TEST_MOST_LIVE" in os.environ:
    _count_live(os.environ["HYBRID_TEST_MOST_LIVE"])

if "HYBRID_TEST_ORACLE" in os.environ and os.path.dirname(__file__) not in sys.path:
    sys.path.insert(0, os.path.dirname(__file__))  # a process that is forked

if "HYBRID_TEST_POOLS" in os.environ:
    _fix_pools(*map(int, os.environ["HYBRID_TEST_POOLS"].split(",")))

{
    "zero_snapshots": _zero_snapshots,
    "grid_of_16": _grid_of_16,
    "experts_by_rank": _experts_by_rank,
    "refuse_pages": _refuse_pages,
    "short_prefills_are_ours": _short_prefills_are_ours,
    "wrong_column": _wrong_column,
    "wrong_drafts": _wrong_drafts,
    "exclude_workers": _exclude_workers,
    "zero_restored_states": _zero_restored_states,
    "slow_restores": _slow_restores,
    "slow_prefills": lambda: _prefills_of(10.0),
    "patient_with_stores": _patient_with_stores,
    "fast_prefills": lambda: _prefills_of(1e-12),
}.get(os.environ.get("HYBRID_TEST_FAULT", ""), lambda: None)()
