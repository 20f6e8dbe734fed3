# SPDX-License-Identifier: Apache-2.0
"""What SGLang keeps of a request beside the states of its slot (Qwen4-Exp).

Some layers add embeddings of n-grams and convolve them.  The last inputs of each such
convolution, and the last tokens, lie in pools of their own by the same slots, so a
slot carries them.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.ple_state_pool import NGramPool

from hybrid_plugin.core.memory.layout import StateGroup
from hybrid_plugin.sglang.pool_rows import sibling_tensors

_TOKEN = torch.int64.itemsize


class RelativeContexts(NGramPool):
    """The last tokens of sequences, as differences from the end-of-text token.

    SGLang's begin with end-of-text tokens.  Slots here begin with zeros, which is then
    the same.
    """

    def __init__(self, pool: NGramPool) -> None:
        """Take the place of a pool that no request has used yet.

        Args:
            pool: SGLang's, with contexts.
        """
        self.__dict__.update(vars(pool))
        self.context.zero_()

    def get_context(self, indices: torch.Tensor) -> torch.Tensor:
        """Tokens `[indices, n]` int64 of slots."""
        found: torch.Tensor = super().get_context(indices) + self.eos_token_id
        return found

    def set_context(self, indices: torch.Tensor, context: torch.Tensor) -> None:
        """Keep tokens `[indices, n]` of slots."""
        super().set_context(indices, context - self.eos_token_id)

    def clear(self) -> None:
        """Begin all anew."""
        self.context.zero_()

    def reset_slots(self, indices: torch.Tensor) -> None:
        """Begin some anew."""
        self.context[indices.long()] = 0


def begin_with_zeros(states: Any) -> None:
    """Have a slot of zeros be that of a sequence without tokens.

    Args:
        states: SGLang's `HybridReqToTokenPool`, before any request.
    """
    before = states.ngram_pool
    if not before.enabled:
        return
    states.ngram_pool = RelativeContexts(before)
    pool = states.mamba_pool
    pool._slot_siblings = [
        states.ngram_pool if one is before else one for one in pool._slot_siblings
    ]


def has_side_states(config: Any) -> bool:
    """Whether layers convolve embeddings of n-grams.

    Args:
        config: SGLang's configuration of a hybrid model.
    """
    return bool(getattr(config, "short_conv_layer_ids", ()))


def groups(config: Any) -> tuple[StateGroup, ...]:
    """Those of a slot.

    Args:
        config: SGLang's configuration of a hybrid model.
    """
    if not has_side_states(config):
        return ()
    channels, taps = config.short_conv_state_shape
    item = config.mamba2_cache_params.dtype.conv.itemsize
    names = tuple(f"{n} n-gram convolution" for n in config.short_conv_layer_ids)
    convolutions = StateGroup(names, channels * taps * item)
    if not config.ngram_context_len:
        return (convolutions,)
    return (
        convolutions,
        StateGroup(("last tokens",), config.ngram_context_len * _TOKEN),
    )


def tensors(states: Any) -> list[torch.Tensor]:
    """All of them, each with a row for each slot in some dimension.

    Args:
        states: SGLang's `HybridReqToTokenPool`.
    """
    return [
        one
        for pool in states.mamba_pool._slot_siblings
        for one in sibling_tensors(pool)
    ]
