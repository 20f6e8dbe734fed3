# SPDX-License-Identifier: Apache-2.0
"""Records of what verified tokens do to the states of vLLM's layers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from hybrid_kernels import replay

from hybrid_plugin.mixers.verifications import Record
from hybrid_plugin.vllm.kernels.convolution import states_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import MambaSpec

_RECORD = "hybrid_plugin_record"
"""Attribute of a layer."""


@dataclass(frozen=True, slots=True)
class RecordForm:
    """What the record of a layer's tokens is like."""

    key_heads: int
    wide_decay: bool
    """Whether every key channel decays by itself."""


def most_rows(
    vllm_config: VllmConfig, states: Iterable[MambaSpec], cache_bytes: int, graphs: int
) -> int:
    """Sequences of a pass that can verify: those that have a state, and a graph's.

    Args:
        vllm_config: of a worker.
        states: of the model's state layers.
        cache_bytes: that the cache has at most.
        graphs: sequences of a graph with prompts, at most.
    """
    each = sum(
        prod(shape) * dtype.itemsize
        for one in states
        for shape, dtype in zip(one.shapes, one.dtypes, strict=True)
    )
    tokens = vllm_config.compilation_config.max_cudagraph_capture_size or 0
    captured = tokens // (1 + vllm_config.num_speculative_tokens)
    most: int = vllm_config.scheduler_config.max_num_seqs
    return min(most, max(1 + cache_bytes // each, captured, graphs))


def allocate(
    layer: Any, convolution: torch.Tensor, form: RecordForm, rows: int, tokens: int
) -> int:
    """Take memory for a layer's record, and hang it on the layer.

    Args:
        layer: vLLM's, whose weights are loaded.
        convolution: its weight, ``[D, W]``.
        form: of the record.
        rows: sequences of a pass that verify, at most.
        tokens: that each of them verifies, at most.

    Returns:
        Its bytes.
    """
    _, shape = layer.get_state_shape()
    inputs_type = layer.get_state_dtype()[0]
    pool = torch.empty((0, *shape), device="meta")
    size = replay.record_size(pool, form.key_heads, wide_decay=form.wide_decay)
    channels, device = convolution.shape[0], convolution.device
    record = Record(
        torch.zeros((rows, tokens, size), dtype=torch.float32, device=device),
        torch.zeros((rows, tokens, channels), dtype=inputs_type, device=device),
    )
    setattr(layer, _RECORD, record)
    return record.states.nbytes + record.inputs.nbytes


def record_of(layer: Any) -> Record | None:
    """A layer's record; None where each token leaves a state."""
    record: Record | None = vars(layer).get(_RECORD)
    return record


def layers_of(
    recorded: Iterable[tuple[Any, torch.Tensor, RecordForm]],
) -> replay.Layers:
    """The layers' states and their records, for the kernel that folds them together.

    Args:
        recorded: vLLM's layers, with their states in place, the weights of their
            convolutions and what their records are like.
    """
    states, windows = [], []
    for layer, convolution, form in recorded:
        record = record_of(layer)
        assert record is not None, "records are allocated before the states are"
        states.append(
            replay.States(
                layer.kv_cache[1], record.states, form.key_heads, form.wide_decay
            )
        )
        windows.append(replay.Windows(states_of(layer, convolution), record.inputs))
    return replay.Layers(states, windows)
