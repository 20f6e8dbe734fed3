# SPDX-License-Identifier: Apache-2.0
"""Tells the core which steps verified drafts, and what became of them."""

from __future__ import annotations

from typing import Any

import torch

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.device.arena import to_device
from hybrid_plugin.device.executor import Executor
from hybrid_plugin.sglang.requests import sequence_id
from hybrid_plugin.sglang.speculation.scratch import DraftScratch
from hybrid_plugin.sglang.speculation.stops import Accepted, Stops


class DraftSteps:
    """The verifications of one server, from launch to result."""

    def __init__(self, cache: HybridCache, executor: Executor) -> None:
        """Speak to the core, and to what takes states from the scratch."""
        self._cache = cache
        self._executor = executor
        self._stops = Stops()

    def launched(self, batch: Any, width: int) -> None:
        """Note a verification that was launched.

        Args:
            batch: SGLang's; its requests stand in the rows of the scratch.
            width: tokens of each that it verifies, the known one counted.
        """
        for row, req in enumerate(batch.reqs):
            name = sequence_id(req.cache_request_handle)
            if self._cache.is_live(name):  # otherwise it ended while this was planned
                begun = self._cache.is_verifying(name)
                start = None if begun else req.kv.kv_committed_len
                self._cache.verify(name, start, width - 1, row=row)

    def sampled(self, batch: Any, width: int, result: tuple[Any, ...]) -> Accepted:
        """End what was accepted at the first stop, and note it for the scratch.

        Args:
            batch: SGLang's.
            width: as above.
            result: of SGLang's `eagle_sample`.
        """
        accepted = Accepted(*result)
        if accepted.path.numel():
            accepted = self._stops.cut(accepted, batch.reqs, batch.seq_lens)
            scratch = self._executor.scratch
            if isinstance(scratch, DraftScratch):
                scratch.note_path(accepted.path, width)
        return accepted

    def resolved(self, batch: Any, accepted: list[int]) -> None:
        """Note the outcome of the oldest verification.

        Args:
            batch: SGLang's, as it was when the verification was launched.
            accepted: drafts of each request that were accepted.
        """
        cache = self._cache
        for req, count in zip(batch.reqs, accepted, strict=True):
            name = sequence_id(req.cache_request_handle)
            ended = req.finished() or req.is_retracted
            if not ended and cache.is_live(name) and cache.is_verifying(name):
                cache.accept(name, count)


def following_tokens(batch: Any, tails: torch.Tensor) -> torch.Tensor:
    """The token behind each prompt's part, which its last draft position takes.

    SGLang puts there what the part's last position samples, but for the one unfinished
    prompt that it knows of.  Where the plugin paused a prompt, it goes on by itself.

    Args:
        batch: SGLang's, of prompts.
        tails: ``[N]``, what SGLang takes.
    """
    rows, tokens = [], []
    for row, req in enumerate(batch.reqs):
        if req.extend_end < len(req.full_untruncated_fill_ids):
            rows.append(row)
            tokens.append(req.full_untruncated_fill_ids[req.extend_end])
    if not rows:
        return tails
    where, what = to_device(torch.tensor([rows, tokens]), tails.device)
    return tails.index_copy(0, where, what.to(tails.dtype))


def with_commands(worker: type) -> type:
    """A class of SGLang's speculative workers that runs the cache's commands.

    Args:
        worker: SGLang's, or a platform's.
    """

    def forward(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        from hybrid_plugin.sglang.prefix_cache import HybridPrefixCache

        run = worker.forward_batch_generation  # type: ignore[attr-defined]
        cache = batch.tree_cache
        if not isinstance(cache, HybridPrefixCache):
            return run(self, batch, *args, **kwargs)
        verifies = batch.forward_mode.is_decode()
        cache.step_begins(batch)
        result = run(self, batch, *args, **kwargs)
        if verifies:
            cache.drafts.launched(batch, result.speculative_num_draft_tokens)
        cache.step_launched(batch)
        return result

    return type(worker.__name__, (worker,), {"forward_batch_generation": forward})
