# SPDX-License-Identifier: Apache-2.0
"""A state layer of SGLang: slots of any tensors, and whatever runs on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from sglang.srt.model_executor.forward_context import get_attn_backend
from sglang.srt.model_executor.runner_utils.forward_batch import get_forward_batch
from torch import nn

from hybrid_models.kit import Mix, StateTensor
from hybrid_plugin.mixers.state_pass import StatePass
from hybrid_plugin.sglang.kernels import model_class, passes


class StateLayer(nn.Module):
    """Keeps `tensors` of each sequence, and has `mix` run passes on them.

    SGLang's backend for short convolutions keeps slots, and says which: nothing of it
    looks at shapes.  Models without attention have the one for Mamba-2 instead.
    """

    def __init__(
        self, layer: int, tensors: Sequence[StateTensor], mix: Mix, *, width: int
    ) -> None:
        """For layer number `layer`."""
        super().__init__()
        self.layer, self.width = layer, width
        self.tensors, self.mix = tuple(tensors), mix

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Inputs ``[T, ...]`` to ``[T, width]``."""
        batch, backend = get_forward_batch(), get_attn_backend()
        shape = inputs[0].shape[0], self.width
        if batch.forward_mode.is_decode():  # steps write padding as well
            out = inputs[0].new_empty(shape)
        else:
            out = inputs[0].new_zeros(shape)
        if batch.forward_mode.is_idle():
            return out
        if hasattr(backend, "short_conv_backend"):
            metadata = backend.short_conv_backend.forward_metadata
            handle = backend.conv_state_metadata(self.layer, batch)
            slots, cache = handle.cache_indices, handle.layer_cache
        else:
            metadata = backend.forward_metadata
            slots = metadata.mamba_cache_indices
            cache = backend.req_to_token_pool.mamba2_layer_cache(self.layer)
        state_pass = pass_of(metadata, batch, slots, len(out))
        self.mix(state_pass, inputs, list(self._pools(cache)), out)
        return out

    def _pools(self, cache: Any) -> Iterator[torch.Tensor]:
        windows = iter(cache.conv)
        for tensor in self.tensors:
            if tensor.is_conv:
                yield next(windows)
            else:
                states = cache.temporal
                yield states.view(states.shape[0], *tensor.shape)


def pass_of(metadata: Any, batch: Any, slots: torch.Tensor, tokens: int) -> StatePass:
    """A pass as the mixers take it.

    Prompts come with running requests among them, as one token each.

    Args:
        metadata: SGLang's `ForwardMetadata`.
        batch: its `ForwardBatch`.
        slots: of its sequences; a slot that nobody owns for padding.
        tokens: of the pass, padding counted.
    """
    if batch.forward_mode.is_decode():
        return StatePass(tokens, tokens, slots[:tokens], None)
    kept = model_class.interior()
    return StatePass(0, tokens, slots[:0], passes.prefills(metadata, batch, kept))
