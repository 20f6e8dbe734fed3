# SPDX-License-Identifier: Apache-2.0
"""Passes that record what drafts do to states, and the commit behind each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from hybrid_kernels import speculative
from sglang.srt.runtime_context import get_spec

from hybrid_plugin.config import HybridConfig
from hybrid_plugin.engine.kernel_choice import Mixer
from hybrid_plugin.mixers.verifications import Record, Verifications
from hybrid_plugin.sglang.kernels.choice import mixer_of
from hybrid_plugin.sglang.kernels.passes import named
from hybrid_plugin.sglang.speculation.arguments import records_drafts
from hybrid_plugin.sglang.speculation.replay.records import Records, rows_of
from hybrid_plugin.sglang.speculation.replay.scratch import ReplayScratch
from hybrid_plugin.sglang.speculation.scratch import drafts_per_step

_VERIFICATIONS = "hybrid_plugin_verifications"


def is_wanted(options: HybridConfig, model: Any) -> bool:
    """Whether drafts are recorded in this process, and their states not kept.

    Args:
        options: of the plugin.
        model: SGLang's `ModelConfig`.
    """
    return drafts_per_step() > 0 and records_drafts(options, model)


class Replay:
    """What records the drafts of the model that this process serves.

    Settled when pools are built, asked by the hooks of every layer and of the commit.
    """

    def __init__(self) -> None:
        self.is_wanted = False
        """Whether pools are to be built without states after drafts."""
        self.scratch: ReplayScratch | None = None
        """Once they are built."""
        self._records: Records | None = None
        self._places: dict[int, int] = {}
        self._is_kda = False

    def build(
        self, rows: Any, tensors: Sequence[torch.Tensor] = ()
    ) -> ReplayScratch | None:
        """Record drafts, where that is wanted.

        Args:
            rows: SGLang's `HybridReqToTokenPool`, with its state pool.
            tensors: for the records; without any, they are allocated.
        """
        if not self.is_wanted:
            return None
        pool = rows.mamba_pool
        self._places = dict(rows.mamba_map)
        states, is_kda = pool.mamba_cache, self._is_kda
        if tensors:
            self._records = Records(states, tensors, is_kda=is_kda)
        else:
            self._records = Records.allocated(
                states, rows_of(rows.size), drafts_per_step(), is_kda=is_kda
            )
        self._records.warm_up(trees=(get_spec().speculative_eagle_topk or 1) > 1)
        self.scratch = ReplayScratch(self._records)
        return self.scratch

    def settle(self, options: HybridConfig, model: Any) -> None:
        """Decide whether drafts are recorded.

        Args:
            options: of the plugin; SGLang's arguments fit them.
            model: SGLang's `ModelConfig`.
        """
        self.is_wanted = is_wanted(options, model)
        self._is_kda = self.is_wanted and mixer_of(model) is Mixer.KDA

    def records(self, backend: Any, batch: Any) -> bool:
        """Whether a pass of a backend is one that verifies and records."""
        return (
            self._records is not None
            and not backend.is_draft_worker
            and batch.forward_mode.is_target_verify()
        )

    def of_layer(self, backend: Any, layer_id: int) -> tuple[Verifications, Record]:
        """What a layer verifies, and where it records it; a CUDA graph may capture it.

        Args:
            backend: SGLang's, of the state layers.
            layer_id: of the model.
        """
        assert self._records is not None
        place = self._places[layer_id]
        metadata = backend.forward_metadata
        if place == 0:
            # In each run of the first layer, so that a graph has it, whatever ran
            # before it was captured.
            setattr(metadata, _VERIFICATIONS, _described(metadata))
        found: Verifications = getattr(metadata, _VERIFICATIONS)
        return found, self._records.of(place)


def _described(metadata: Any) -> Verifications:
    """The sequences of a pass, from SGLang's `ForwardMetadata`."""
    parents: torch.Tensor | None = None
    if metadata.retrieve_next_token is not None:
        parents = metadata.retrieve_parent_token
        assert parents is not None, "SGLang has room for parents beside links"
        parents.copy_(
            speculative.parents_of_links(
                metadata.retrieve_next_token, metadata.retrieve_next_sibling
            )
        )
    return Verifications(
        cu_seqlens=metadata.query_start_loc,
        slots=named(metadata.mamba_cache_indices),
        columns=None,
        parents=parents,
    )


def commit(
    replay: Replay,
    original: Callable[..., None],
    backend: Any,
    last_correct_step_indices: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Hook of `HybridLinearAttnBackend.update_mamba_state_after_mtp_verify`.

    Args:
        replay: of this process.
        original: SGLang's method.
        backend: whose method it is.
        last_correct_step_indices: ``[N]``, the last accepted draft of each sequence,
            the known token being 0.
        args: about SGLang's own cache.
        kwargs: likewise.
    """
    scratch = replay.scratch
    if scratch is None:
        original(backend, last_correct_step_indices, *args, **kwargs)
        return
    count = len(last_correct_step_indices)
    metadata = backend.linear_attn_backend.forward_metadata
    parents = metadata.retrieve_parent_token
    if metadata.retrieve_next_token is None:
        parents = None
    # The next pass may write metadata at the same addresses before this is folded.
    scratch.note_accepted(
        named(metadata.mamba_cache_indices[:count]),
        (last_correct_step_indices + 1).int(),
        None if parents is None else parents[:count].to(torch.int32, copy=True),
    )


def without_draft_states(
    replay: Replay, original: Callable[..., None], *args: Any, **kwargs: Any
) -> None:
    """Hook of `HybridReqToTokenPool._init_mamba_pool`, which takes names.

    Where drafts are recorded, the pool is one without speculation.
    """
    if replay.is_wanted:
        kwargs |= {"speculative_num_draft_tokens": None}
    original(*args, **kwargs)
