# SPDX-License-Identifier: Apache-2.0
"""Which graphs with prefills are worth replaying: measured when they are captured.

A graph saves the time in which the host launches a pass.  It pads the pass, and runs
its decodes as prefills of one token.  As long as its replay takes less than the host's
launch, nothing is lost to either, for without a graph the device would wait for the
host.  From a replay that takes longer on, the device is what a pass waits for.

A replay takes longer the more sequences the pass has, up to those that the graph has
room for: so many of them replay it as its replay takes no longer than a launch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hybrid_plugin.vllm import activation
from hybrid_plugin.vllm.kernels import layers

Forward = Callable[[Any], None]
"""Runs a pass; given vLLM's mode of graphs."""
FITS = "_hybrid_plugin_fits"
"""Attribute of vLLM's manager: the `Fits` of its graphs with prefills."""


@dataclass(frozen=True, slots=True)
class Fits:
    """Which passes replay graphs with prefills."""

    sequences: Mapping[Any, int]
    """Of a pass that replays a graph, at most, by the graph's description."""
    others: Mapping[Any, Sequence[Any]]
    """vLLM's candidates without these graphs, for passes of more sequences."""


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds that were measured of a graph."""

    launch: float
    """In which the host launches its pass without it."""
    least: float
    """Of a replay with the least that it is replayed for: one sequence of one token
    more than the next smaller graph holds."""
    most: float
    """Of a replay with as many sequences as it has room for."""

    def sequences(self, room: int) -> int:
        """With how many sequences a replay takes no longer than a launch; 0 for none.

        Each takes as much as any other.

        Args:
            room: sequences of the graph.
        """
        if self.most <= self.launch:
            return room
        if self.least > self.launch:
            return 0
        share = (self.launch - self.least) / (self.most - self.least)
        return 1 + int(share * (room - 1))


def capture(
    original: Callable[..., None],
    manager: Any,
    create: Callable[..., Forward],
    *more: Any,
) -> None:
    """Capture vLLM's graphs and ours, and settle which passes replay ours.

    Args:
        original: of vLLM, which captures what `manager` describes.
        manager: its `CudaGraphManager`.
        create: its second argument: makes a pass of a graph.
        more: its other arguments.
    """
    ours = _of_prefills(manager)
    if ours:
        _make_room(create, ours)
    # vLLM captures a few graphs before, to measure their memory, and drops them.
    if not ours or manager._max_full_descs_to_capture is not None:
        original(manager, create, *more)
        return
    launches: dict[Any, float] = {}

    def create_timed(graph: Any, warmup: bool) -> Forward:
        forward = create(graph, warmup)
        if not warmup or graph not in ours:
            return forward

        def warm_up(mode: Any) -> None:
            forward(mode)  # compiles what is still to be compiled
            launches[graph] = _seconds(lambda: forward(mode), until_done=False)

        return warm_up

    original(manager, create_timed, *more)
    times = {}
    for graph, launch in launches.items():
        smaller = [g.num_tokens for g in launches if g.num_tokens < graph.num_tokens]
        replays = _replays(manager, create, graph, 1 + max(smaller, default=0))
        times[graph] = Times(launch, *replays)
    keep(manager, times)
    _tell(manager, times)


def _replays(
    manager: Any, create: Callable[..., Forward], graph: Any, tokens: int
) -> tuple[float, float]:
    """Seconds of a graph's replay over one sequence, and over its own inputs.

    All graphs read theirs from the same buffers, which have those of the graph that was
    captured last.  FlashAttention's plan of another batch sends it beside its tables.

    Args:
        manager, create: as in `capture`.
        graph: its description.
        tokens: of the one sequence.
    """
    create(graph, False)
    most = _least_seconds(manager.graphs[graph].replay)
    found = layers.all_of(manager.vllm_config)
    for tables in found.tables if found else ():
        tables.leave_one(tokens)
    return min(most, _least_seconds(manager.graphs[graph].replay)), most


def _least_seconds(work: Callable[[], object]) -> float:
    return min(_seconds(work) for _ in range(2))


def _make_room(create: Callable[..., Forward], graphs: set[Any]) -> None:
    """Run the longest pass of all first: vLLM keeps room for as many outputs as the
    first one has, and of its own the longest are first."""
    from vllm.config.compilation import CUDAGraphMode

    longest = max(graphs, key=lambda graph: graph.num_tokens)
    create(longest, True)(CUDAGraphMode.NONE)


def _of_prefills(manager: Any) -> set[Any]:
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager

    found = layers.all_of(manager.vllm_config)
    is_of_the_model = isinstance(manager, ModelCudaGraphManager)  # drafters have theirs
    if found is None or found.graphs is None or not is_of_the_model:
        return set()
    captured = manager._capture_descs.get(CUDAGraphMode.FULL, ())
    return {one for one in captured if found.graphs.hold(one.num_reqs, one.num_tokens)}


def keep(manager: Any, times: Mapping[Any, Times]) -> None:
    """Drop graphs that save nothing, and note for which passes the others do.

    All ranks must replay the same graphs: what the slowest one says holds for all.

    Args:
        manager: vLLM's, with graphs that are captured.
        times: of each of ours.
    """
    graphs = sorted(times, key=lambda one: (one.num_tokens, one.num_active_loras))
    fits = torch.tensor([times[one].sequences(one.num_reqs) for one in graphs]).int()
    _agree(fits)
    # Data-parallel ranks have different sequences, and one graph for all of them.
    ranks = manager.vllm_config.parallel_config.data_parallel_size
    sequences: dict[Any, int] = {}
    for graph, fit in zip(graphs, fits.tolist(), strict=True):
        if fit and (ranks == 1 or fit == graph.num_reqs):
            sequences[graph] = fit
            continue
        del manager.graphs[graph]
        for known in (manager._candidates, manager._capture_descs):
            for graphs_of_a_key in known.values():
                if graph in graphs_of_a_key:
                    graphs_of_a_key.remove(graph)
    others = {
        key: [one for one in candidates if one not in sequences]
        for key, candidates in manager._candidates.items()
    }
    setattr(manager, FITS, Fits(sequences, others))
    _narrow(manager, frozenset(graph.num_tokens for graph in sequences))


def _narrow(manager: Any, kept: frozenset[int]) -> None:
    """Have no other pass described as one of a graph's."""
    found = layers.all_of(manager.vllm_config)
    assert found is not None and found.graphs is not None
    found.limit_graphs(replace(found.graphs, kept=kept))


def _agree(fits: torch.Tensor) -> None:
    """Leave the least of all ranks, in place."""
    from vllm.distributed.parallel_state import get_world_group

    world = get_world_group()
    if world.world_size > 1:
        least = torch.distributed.ReduceOp.MIN
        torch.distributed.all_reduce(fits, op=least, group=world.cpu_group)


def _tell(manager: Any, times: Mapping[Any, Times]) -> None:
    sequences = getattr(manager, FITS).sequences
    if not sequences:
        smallest = min(times, key=lambda graph: graph.num_tokens)
        activation.logger.info(
            "passes with prefills replay no CUDA graphs: that of %d tokens takes %.1f "
            "ms for one sequence, and the host launches its pass in %.1f.",
            smallest.num_tokens,
            1e3 * times[smallest].least,
            1e3 * times[smallest].launch,
        )
        return
    largest = max(sequences, key=lambda graph: graph.num_tokens)
    activation.logger.info(
        "passes with prefills of up to %d tokens and %d sequences replay CUDA graphs: "
        "%.1f ms for one sequence and %.1f for %d, where the host needs %.1f to launch "
        "one (%d of %d graphs).",
        largest.num_tokens,
        sequences[largest],
        1e3 * times[largest].least,
        1e3 * times[largest].most,
        largest.num_reqs,
        1e3 * times[largest].launch,
        len(sequences),
        len(times),
    )


def _seconds(work: Callable[[], object], *, until_done: bool = True) -> float:
    """Seconds that the host needs to launch work, or the device until it is done."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    if until_done:
        torch.cuda.synchronize()
    return time.perf_counter() - begin
