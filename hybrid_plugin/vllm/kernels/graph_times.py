# SPDX-License-Identifier: Apache-2.0
"""Which graphs with prefills are worth replaying: measured when they are captured.

A graph saves the time in which the host launches a pass, and it pads the pass.  As long
as its replay takes less than the host's launch, nothing is lost to padding, for without
a graph the device would wait for the host.  From a replay that takes longer on, the
device is what a pass waits for, and padding is work that it does for nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from hybrid_plugin.vllm import activation
from hybrid_plugin.vllm.kernels import layers

Forward = Callable[[Any], None]
"""Runs a pass; given vLLM's mode of graphs."""


def capture(
    original: Callable[..., None],
    manager: Any,
    create: Callable[..., Forward],
    *more: Any,
) -> None:
    """Capture vLLM's graphs and ours, and drop those of ours that save nothing.

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
    replays = {graph: _replay_seconds(manager, create, graph) for graph in launches}
    drop(manager, launches, replays)
    _tell(manager, launches, replays)


def _replay_seconds(manager: Any, create: Callable[..., Forward], graph: Any) -> float:
    """Seconds of a graph's replay, over its own inputs.

    All graphs read theirs from the same buffers, which have those of the graph that was
    captured last.  FlashAttention's plan of another batch sends it beside its tables.
    """
    create(graph, False)
    return min(_seconds(manager.graphs[graph].replay) for _ in range(2))


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


def drop(
    manager: Any, launches: Mapping[Any, float], replays: Mapping[Any, float]
) -> None:
    """Drop graphs whose replay takes longer than a launch, on the slowest rank.

    All ranks must replay the same graphs: what one drops, all do.

    Args:
        manager: vLLM's, with graphs that are captured.
        launches: seconds in which the host launches a pass, by graph.
        replays: seconds of a replay.
    """
    graphs = sorted(launches, key=lambda one: (one.num_tokens, one.num_active_loras))
    saves = torch.tensor([replays[one] <= launches[one] for one in graphs]).int()
    _agree(saves)
    for graph, keep in zip(graphs, saves.tolist(), strict=True):
        if keep:
            continue
        del manager.graphs[graph]
        for candidates in manager._candidates.values():
            if graph in candidates:
                candidates.remove(graph)


def _agree(saves: torch.Tensor) -> None:
    """Leave what holds on all ranks, in place."""
    from vllm.distributed.parallel_state import get_world_group

    world = get_world_group()
    if world.world_size > 1:
        least = torch.distributed.ReduceOp.MIN
        torch.distributed.all_reduce(saves, op=least, group=world.cpu_group)


def _tell(
    manager: Any, launches: Mapping[Any, float], replays: Mapping[Any, float]
) -> None:
    kept = [graph for graph in launches if graph in manager.graphs]
    if not kept:
        activation.logger.info(
            "passes with prefills replay no CUDA graphs: on this device they compute "
            "for longer than the host needs to launch them."
        )
        return
    largest = max(kept, key=lambda graph: graph.num_tokens)
    activation.logger.info(
        "passes with prefills of up to %d tokens and %d sequences replay CUDA graphs: "
        "%.1f ms, where the host needs %.1f to launch one (%d of %d graphs).",
        largest.num_tokens,
        largest.num_reqs,
        1e3 * replays[largest],
        1e3 * launches[largest],
        len(kept),
        len(launches),
    )


def _seconds(work: Callable[[], object], *, until_done: bool = True) -> float:
    """Seconds that the host needs to launch work, or the device until it is done."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    if until_done:
        torch.cuda.synchronize()
    return time.perf_counter() - begin
