# SPDX-License-Identifier: Apache-2.0
"""Tells the core which steps verified drafts, and what became of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.commands import Command
from hybrid_plugin.device.executor import Executor
from hybrid_plugin.sglang.requests import sequence_id
from hybrid_plugin.sglang.speculation.replay.scratch import Owner, ReplayScratch
from hybrid_plugin.sglang.speculation.scratch import DraftScratch
from hybrid_plugin.sglang.speculation.stops import Accepted, Stops


class DraftSteps:
    """The verifications of one server, from launch to result."""

    def __init__(self, cache: HybridCache, executor: Executor) -> None:
        """Speak to the core, and to what takes states from the scratch."""
        self._cache = cache
        self._executor = executor
        self._stops = Stops()

    def precede(self, commands: Sequence[Command], *, verifies: bool) -> None:
        """Do what must be done before commands run that the cache drained.

        Args:
            commands: the cache's, of the next pass.
            verifies: whether that pass verifies drafts.
        """
        scratch = self._executor.scratch
        if isinstance(scratch, ReplayScratch):
            scratch.settle(commands, self._is_live, keep_live=not verifies)

    def _is_live(self, owner: Owner) -> bool:
        cache = self._cache
        return cache.is_live(owner.name) and (
            cache.sequence(owner.name) is owner.sequence
        )

    def launched(self, batch: Any, width: int) -> None:
        """Note a verification that was launched.

        SGLang does not count ahead, but says how many tokens are known: were they not
        those that the outcomes so far make, the cache would refuse.

        Args:
            batch: SGLang's; its requests stand in the rows of the scratch.
            width: tokens of each that it verifies, the known one counted.
        """
        owners: list[Owner | None] = []
        for row, req in enumerate(batch.reqs):
            name, owner = sequence_id(req.cache_request_handle), None
            if self._cache.is_live(name):  # otherwise it ended while this was planned
                owner = Owner(name, self._cache.sequence(name))
                begun = self._cache.is_verifying(name)
                start = None if begun else req.kv.kv_committed_len
                known = len(req.origin_input_ids) + len(req.output_ids)
                self._cache.verify(name, start, width - 1, row=row, known=known)
            owners.append(owner)
        if isinstance(self._executor.scratch, ReplayScratch):
            self._executor.scratch.note_owners(owners)

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
            if isinstance(scratch, DraftScratch | ReplayScratch):
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
