# SPDX-License-Identifier: Apache-2.0
"""The request's front door: from its look-up to its end, equal for every engine.

An adapter says what an engine's request is (`IncomingRequest`) and calls in this order:

    (expect) -> plan_sharing -> must_wait -> must_wait_for_restore -> look_up
        -> chunk_end -> admit -> cross -> advance -> cross ... -> end

What an engine's scheduler decides between two calls may take any number of steps.  In
the meantime other requests change the tree, so a look-up is repeated when it is stale.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Protocol

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.memory.window_tables import WindowDemand
from hybrid_plugin.core.policy.in_batch_sharing import (
    LOOK_AHEAD,
    InBatchPrefixSharing,
    Prefill,
    waiting_prefill,
)
from hybrid_plugin.core.sequence import Admission, LookUp
from hybrid_plugin.core.tiers.fetches import Fetching
from hybrid_plugin.core.tiers.outer import Awaited
from hybrid_plugin.core.tree.tokens import Tokens, as_tokens
from hybrid_plugin.engine.hints import Hints
from hybrid_plugin.tiers.failure import Failure
from hybrid_plugin.tiers.peers.params import PeerOffer
from hybrid_plugin.tiers.peers.tier import PeerTier


class IncomingRequest(Protocol):
    """What the front door asks of an engine's request."""

    @property
    def seq_id(self) -> str:
        """Name of its sequence, unlike that of every other request."""

    @property
    def num_tokens(self) -> int:
        """Tokens that are known: of the prompt, and of the output before a preemption.

        Asked for often; must take constant time.
        """

    @property
    def max_tokens(self) -> int:
        """Tokens that it will have at most."""

    def tokens(self) -> Sequence[int]:
        """Those tokens.  Equal ones must mean equal content.

        The front door keeps what it gets: it must not change afterwards.
        """

    def namespace(self) -> Hashable:
        """What the whole request must have in common with another."""

    @property
    def cacheable(self) -> bool:
        """Whether tokens and namespace say all about it; if not, nothing is kept."""

    @property
    def may_hit(self) -> bool:
        """Whether it may be served from the cache."""

    @property
    def is_check(self) -> bool:
        """Whether it repeats another one to check a hit: it leaves nothing, and counts
        nowhere."""

    @property
    def may_pause(self) -> bool:
        """Whether its prefill may end a chunk for a snapshot."""

    @property
    def hint(self) -> object:
        """What the application says about the cache, of any type; see `hints`."""

    @property
    def resumed(self) -> bool:
        """Whether it ran before and was preempted."""

    @property
    def is_over(self) -> bool:
        """Whether it was finished or aborted, and will not run again."""


@dataclass(slots=True)
class _Waiting:
    """What is known of a request that is not admitted yet."""

    tokens: Tokens
    """Kept because a request may be looked up many times before it is admitted."""
    limit: int | None = None
    """Tokens that the engine lets it restore at most."""
    found: LookUp | None = None
    restore: Awaited | None = None
    """From another tier, that it waited for last."""
    forget_offer: Callable[[], None] | None = None
    """Where a peer has offered something for it: notes that it needs that no more."""


class FrontDoor:
    """Leads requests into and out of a `HybridCache`."""

    def __init__(
        self,
        cache: HybridCache,
        logger: logging.Logger,
        clock: Callable[[], float] | None,
    ) -> None:
        """Start without requests.

        Args:
            cache: of the engine.
            logger: the adapter's, for bad hints.
            clock: returns the time in seconds, for TTLs.  Where each rank has a cache,
                it must return the same on all of them in the same call; None, and
                TTLs are refused, where there is no such time.
        """
        self.cache = cache
        self._clock = clock
        self._hints = Hints(logger, knows_time=clock is not None)
        self._sharing = InBatchPrefixSharing(cache)
        self._waiting: dict[str, _Waiting] = {}

    @property
    def waiting(self) -> int:
        """Number of requests that are known and not admitted."""
        return len(self._waiting)

    # ------------------------------------------------------- before admission

    def plan_sharing(self, waiting: Iterable[IncomingRequest]) -> None:
        """Decide which waiting requests wait for another one to compute their prefix.

        Args:
            waiting: in the order in which they are served, of which the first
                `LOOK_AHEAD` that are not live are read.
        """
        new = (one for one in waiting if not self.cache.is_live(one.seq_id))
        self._sharing.plan(
            [
                (request.seq_id, partial(self._prefill, request))
                for request in islice(new, LOOK_AHEAD)
                if request.cacheable and request.may_hit
            ]
        )

    def must_wait(self, seq_id: str) -> bool:
        """Whether a request waits for another one in this step."""
        return not self.cache.is_live(seq_id) and self._sharing.holds(seq_id)

    def must_wait_for_restore(self, request: IncomingRequest) -> bool:
        """Whether a request waits for its prefix, on the way from another tier.

        Call it for a waiting request that could be admitted in this step, and let time
        pass at each step (`pass_time`).  Its look-up comes behind this call, or is made
        again if it is stale by then.
        """
        if self.cache.host is None or self.cache.is_live(request.seq_id):
            return False
        waiting = self._note(request)
        if waiting.restore is not None and not waiting.restore.is_over:
            if not self.cache.lower_tiers.is_restored(waiting.restore):
                return True
            if waiting.restore.is_over:
                return False
            self._await(waiting, None)  # it takes too long
        found = self._find(request, waiting.tokens, waiting.limit)
        restore = self.cache.lower_tiers.restore(found, waiting.restore)
        if restore is None:
            return False
        self._await(waiting, restore)
        return not self.cache.lower_tiers.is_restored(restore)

    def expect(
        self, request: IncomingRequest, tier: PeerTier, offer: PeerOffer
    ) -> Failure | None:
        """Begin to fetch what a peer offers for a request that has just come.

        Call it before anything else of the request; the offer counts until it is
        admitted or over.

        Args:
            request: that is not live.
            tier: of peers, behind the cache's host memory.
            offer: that came with it.

        Returns:
            Why the offer is of no use; None if it is.
        """
        if not request.cacheable:
            return None
        if not request.may_hit:
            tokens = as_tokens(request.tokens())
            failure = tier.refusal(request.namespace(), tokens, offer)
            if failure is None and not tier.reads(offer):  # for another request
                self.cache.lower_tiers.decline(offer.text)
            return failure
        waiting = self._note(request)
        failure = tier.expect(request.namespace(), waiting.tokens, offer)
        if failure is not None:
            return failure
        waiting.forget_offer = partial(self._forget_offer, tier, offer)
        self.pass_time()
        found = self._find(request, waiting.tokens, waiting.limit)
        fetch = self.cache.lower_tiers.prefetch(found)
        if fetch is not None:
            self._await(waiting, fetch)
        return None

    def seek(
        self, request: IncomingRequest, look: Callable[[Hashable, Tokens], None]
    ) -> None:
        """Have a request that has just come looked up elsewhere.

        Args:
            request: that is not live.
            look: gets its namespace and tokens, if it may be served from the cache.
        """
        if request.may_hit and request.cacheable and self.cache.host is not None:
            look(request.namespace(), self._note(request).tokens)

    def is_restoring(self, seq_id: str) -> bool:
        """Whether a restore for a waiting request has begun and is not over."""
        waiting = self._waiting.get(seq_id)
        restore = None if waiting is None else waiting.restore
        return restore is not None and not restore.is_over

    def is_fetching(self, seq_id: str) -> bool:
        """Whether a waiting request waits for what is on the way to host memory."""
        waiting = self._waiting.get(seq_id)
        awaited = None if waiting is None else waiting.restore
        return isinstance(awaited, Fetching) and not awaited.is_over

    def is_stale(self, seq_id: str) -> bool:
        """Whether the tree has changed since a waiting request was looked up."""
        waiting = self._waiting.get(seq_id)
        return (
            waiting is None
            or waiting.found is None
            or not self.cache.is_current(waiting.found)
        )

    def forget_look_ups(self) -> None:
        """Look all waiting requests up anew: what names them has changed."""
        for waiting in self._waiting.values():
            waiting.found = None

    def look_up(self, request: IncomingRequest, limit: int | None = None) -> LookUp:
        """Find what a waiting request can resume from; nothing is held for it yet.

        Args:
            request: that is not live.
            limit: restore at most this many tokens.
        """
        waiting = self._note(request)
        waiting.limit = limit
        waiting.found = self._find(request, waiting.tokens, limit)
        return waiting.found

    def admit(
        self,
        request: IncomingRequest,
        hit: int,
        *,
        num_tokens: int,
        reserve_tokens: int = 0,
        watermark_pages: int = 0,
        window_demand: WindowDemand | None = None,
    ) -> Admission | None:
        """Start a request's sequence with pages and a slot.

        Args:
            request: that is not live.
            hit: tokens that the engine counts as restored.
            num_tokens: tokens to have pages for now.
            reserve_tokens: tokens that must fit, though pages for them come later.
            watermark_pages: pages that must be left over.
            window_demand: bounds the pages to reserve in each window group; None
                reserves none.

        Returns:
            None if there is no room, or if `hit` tokens cannot be restored any more:
            the engine looks it up again in a later step.  Nothing has changed then.
        """
        self.pass_time()
        waiting = self._note(request)
        found = waiting.found
        if (
            found is None
            or found.match.length != hit
            or not self.cache.is_current(found)
        ):
            found = self._find(request, waiting.tokens, hit)
            waiting.found = found
        if found.match.length != hit:
            return None
        if self.cache.policy.canonical:
            # Who is preempted computes its answer again as a prompt, to other bits.
            reserve_tokens = max(reserve_tokens, request.max_tokens)
        admission = self.cache.admit(
            request.seq_id,
            found,
            num_tokens=num_tokens,
            reserve_tokens=reserve_tokens,
            watermark_pages=watermark_pages,
            window_demand=window_demand,
            cacheable=request.cacheable and not request.is_check,
            resumed=request.resumed,
            counted=not request.is_check,
        )
        if admission is not None:
            self.forget(request.seq_id)
        return admission

    def chunk_end(self, request: IncomingRequest, start: int, end: int) -> int:
        """Return where a chunk of a request's prefill should end.

        Args:
            request: waiting, after its look-up, or live.
            start: its first token in the chunk.
            end: where the engine would end it.
        """
        positions = self.snapshot_positions(request.seq_id) if request.may_pause else ()
        return self.cache.chunk_end(positions, start, end, request.num_tokens)

    def snapshot_positions(self, seq_id: str) -> tuple[int, ...]:
        """Where a request's prefill should pause for a snapshot."""
        if self.cache.is_live(seq_id):
            return self.cache.snapshot_positions_of(seq_id)
        waiting = self._waiting.get(seq_id)
        if waiting is None or waiting.found is None:
            return ()
        return waiting.found.snapshot_positions

    # -------------------------------------------------------- after admission

    def cross(self, seq_id: str, end: int) -> None:
        """Order what the next forward pass keeps of a request's states inside.

        Call it before the commands that precede the pass are drained.  Nothing is done
        for a request that is not live.

        Args:
            seq_id: a request that the pass takes on.
            end: tokens that are computed once the pass has run.
        """
        if self.cache.is_live(seq_id):
            self.cache.cross(seq_id, end)

    def advance(self, seq_id: str, computed: int) -> None:
        """Note that a scheduled step takes a request to `computed` final tokens.

        Call it after the commands that precede the step were drained.  Nothing is
        done for a request that is not live: it may have been aborted meanwhile.
        """
        if not self.cache.is_live(seq_id):
            return
        if self.cache.is_prefilling(seq_id):
            self.cache.advance(seq_id, computed)
        elif self.cache.windows:
            self.cache.trim(seq_id, computed)

    def end(self, request: IncomingRequest, computed: int) -> None:
        """End a request: finished, aborted or preempted, live or not.

        Args:
            request: that the engine lets go.
            computed: tokens that all steps scheduled so far compute; not used for a
                request whose steps were noted with `HybridCache.verify`.
        """
        self.forget(request.seq_id)
        if self.cache.is_live(request.seq_id):
            self.pass_time()
            noted = self.cache.is_verifying(request.seq_id)
            self.cache.finish(
                request.seq_id,
                request.tokens(),
                None if noted else computed,
                preempted=not request.is_over,
            )

    def withdraw(self, seq_id: str) -> None:
        """Take back an admission that the engine did not use."""
        if self.cache.is_live(seq_id):
            self.cache.finish(seq_id, (), 0)

    def forget(self, seq_id: str) -> None:
        """Drop what is known of a request that was never admitted."""
        waiting = self._waiting.pop(seq_id, None)
        if waiting is None:
            return
        self._await(waiting, None)
        if waiting.forget_offer is not None:
            waiting.forget_offer()

    def count_preemption(self) -> None:
        """Count a running request that was put back into the queue."""
        self.cache.stats.preemptions += 1

    def flush(self) -> bool:
        """Forget everything cached; False, with nothing changed, while one is live."""
        flushed = self.cache.flush()
        if flushed:
            self._waiting.clear()
        return flushed

    def pass_time(self) -> None:
        """Let the cache know the time, where there is one."""
        if self._clock is not None:
            self.cache.pass_time(self._clock())

    # --------------------------------------------------------------- internal

    def _await(self, waiting: _Waiting, awaited: Awaited | None) -> None:
        """Have a request wait for something else than before, or for nothing.

        What it waited for stays until then.
        """
        before, waiting.restore = waiting.restore, awaited
        if awaited is not None:
            self.cache.lower_tiers.join(awaited)
        if before is not None:
            self.cache.lower_tiers.leave(before)

    def _forget_offer(self, tier: PeerTier, offer: PeerOffer) -> None:
        if tier.forget(offer):
            self.cache.lower_tiers.decline(offer.text)

    def _note(self, request: IncomingRequest) -> _Waiting:
        """The record of a waiting request, with all its tokens."""
        waiting = self._waiting.get(request.seq_id)
        if waiting is None or len(waiting.tokens) != request.num_tokens:
            self.forget(request.seq_id)
            waiting = _Waiting(as_tokens(request.tokens()))
            self._waiting[request.seq_id] = waiting
        return waiting

    def _find(
        self, request: IncomingRequest, tokens: Tokens, limit: int | None
    ) -> LookUp:
        namespace = request.namespace()
        ttl = self._hints.ttl(request.hint)
        if not request.may_hit or not request.cacheable:
            return self.cache.bypass(tokens, namespace, ttl=ttl)
        return self.cache.look_up(
            tokens,
            namespace,
            limit,
            snapshot_at=self._hints.keep(request.hint),
            pause_at=self._sharing.pauses_of(request.seq_id),
            ttl=ttl,
        )

    def _prefill(self, request: IncomingRequest) -> Prefill:
        tokens = self._note(request).tokens
        return waiting_prefill(self.cache, request.seq_id, tokens, request.namespace())
