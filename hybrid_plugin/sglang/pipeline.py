# SPDX-License-Identifier: Apache-2.0
"""Stages of a pipeline: which layers each has, and what is not served in stages.

A scheduler runs on each stage and decides by itself, so all that it decides by must be
equal: pools have as many ids everywhere as fit beside the most layers of each kind, and
requests bring the time of the first stage along (`clock`).  Several batches are under
way at once, each at another stage; every stage launches them, and handles their
results, in one order.  A batch's commands run on the stream of its forward pass, behind
the passes of all batches before it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.distributed.utils import get_pp_indices
from sglang.srt.runtime_context import get_parallel

from hybrid_plugin.config import HybridConfig
from hybrid_plugin.engine import untried
from hybrid_plugin.engine.stages import stages_differ, unserved_options
from hybrid_plugin.sglang.cache_kinds import kept_beside

STAGES_DIFFER = stages_differ("SGLANG_PP_LAYER_PARTITION")


@dataclass(frozen=True)
class StageLayers:
    """The numbers of the layers that one rank has."""

    attention: tuple[int, ...]
    """With KV of full attention."""
    states: tuple[int, ...]


def all_layers(model: Any) -> StageLayers:
    """Those of the whole model.

    Args:
        model: SGLang's `ModelConfig`, of a model with states.
    """
    hybrid = mambaish_config(model)
    return StageLayers(
        tuple(hybrid.full_attention_layer_ids), tuple(hybrid.mamba2_cache_params.layers)
    )


def layers_of_ranks(configurator: Any) -> list[StageLayers]:
    """The layers that SGLang builds pools for on each rank, the same list on each.

    Some classes (Nemotron-H) do not say which layers a stage has, and every stage gets
    memory for all of them.

    Args:
        configurator: SGLang's `KVCacheConfigurator`.
    """
    whole, parallel = all_layers(configurator.model_config), get_parallel()
    if parallel.pp_size == 1:
        return [whole]
    own = range(configurator.layer_info.start_layer, configurator.layer_info.end_layer)
    here = _within(whole, own)
    found: list[Any] = [None] * parallel.launch_world_size
    torch.distributed.all_gather_object(found, here, parallel.world_group.cpu_group)
    return found


def layers_of_stages(model: Any, kind: type[Any]) -> list[StageLayers]:
    """The same before there are ranks, for each stage, as SGLang will divide layers.

    Args:
        model: SGLang's `ModelConfig`.
        kind: the class that SGLang will build.
    """
    whole, stages = all_layers(model), get_parallel().pp_size
    if stages == 1 or not _says_its_stage(kind):
        return [whole]
    layers = model.num_hidden_layers
    ends = (get_pp_indices(layers, stage, stages) for stage in range(stages))
    return [_within(whole, range(*both)) for both in ends]


def _says_its_stage(kind: type[Any]) -> bool:
    """Whether objects of a class will say which layers their stage has.

    Some have a property for it, and others are given it when they are built.
    """
    return hasattr(kind, "start_layer") or (
        "start_layer" in inspect.unwrap(kind.__init__).__code__.co_names
    )


def _within(whole: StageLayers, stage: range) -> StageLayers:
    """Those of the layers that are a stage's."""
    return StageLayers(
        tuple(n for n in whole.attention if n in stage),
        tuple(n for n in whole.states if n in stage),
    )


def largest(ranks: Sequence[StageLayers]) -> StageLayers:
    """As many layers of each kind as any rank has, the same on all of them."""
    return StageLayers(
        max((rank.attention for rank in ranks), key=len),
        max((rank.states for rank in ranks), key=len),
    )


def hindrance(ranks: Sequence[StageLayers]) -> str | None:
    """Why pools cannot be elastic: pages and slots are not as large on every rank."""
    counts = {(len(rank.attention), len(rank.states)) for rank in ranks}
    return STAGES_DIFFER if len(counts) > 1 else None


def speaks() -> bool:
    """Whether this rank logs and counts for its replica, whose ranks are all equal."""
    return bool(get_parallel().tp_rank == 0 and get_parallel().pp_rank == 0)


def obstacles(
    view: Any, options: HybridConfig, model: Any, *, windows: bool
) -> Iterator[str]:
    """Sentences about what the plugin does not serve in stages, with the way out.

    Args:
        view: of SGLang's arguments.
        options: of the plugin.
        model: SGLang's `ModelConfig`.
        windows: whether the model has a pool for attention with windows.
    """
    if view.pp_size == 1:
        return
    if view.device != "cpu" and untried.is_refused(untried.STAGES):
        yield "pipeline parallelism is served on CPUs only; use tensor parallelism."
    if view.speculative_algorithm is not None:
        yield (
            "drafts are not served with pipeline parallelism yet; drop "
            "--speculative-algorithm."
        )
    for name in kept_beside(model, windows=windows):
        yield f"{name} are not served with pipeline parallelism yet; drop --pp-size."
    if max(view.dp_size, view.attn_dp_size or 1) > 1:
        yield (
            "data parallelism was not tested with pipeline parallelism; drop --dp-size "
            "or --pp-size."
        )
    yield from unserved_options(options)
