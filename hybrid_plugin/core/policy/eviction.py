# SPDX-License-Identifier: Apache-2.0
"""Eviction policies: what cached content is worth; the least worth is evicted first.

The tree ranks a leaf or snapshot when it is used, and again before it is evicted.
"""

from __future__ import annotations

from collections.abc import Hashable

from hybrid_plugin.core.policy.aged_order import Rank, Rates
from hybrid_plugin.core.policy.costs import PASS_TOKENS
from hybrid_plugin.core.policy.reuse_classes import (
    KV_ALONE,
    class_of,
    unused_class,
    used_class,
)
from hybrid_plugin.core.policy.ttls import ReuseWithTtls, Ttls
from hybrid_plugin.core.tree.node import ADMISSION, Node, admissions_between
from hybrid_plugin.core.tree.snapshot import Snapshot, SnapshotKind


class ConstantRates:
    """Rates that neither age nor anything seen changes: 1 for all."""

    def rate(self, kind: Hashable, age: int) -> float:
        """See `Rates`."""
        return 1.0

    def enter(self, kind: Hashable, since: int, now: int) -> int:
        """See `Rates`."""
        return 0

    def leave(self, kind: Hashable, group: int, now: int) -> None:
        """See `Rates`."""


class LeastRecentlyUsed:
    """Worth is recency; the base class of all policies."""

    def __init__(self) -> None:
        self.rates: Rates = ConstantRates()
        self.ttls = Ttls()

    def leaf(self, node: Node) -> Rank:
        """Rank of an unlocked leaf of the tree."""
        return Rank(None, 0, node.used_at)

    def snapshot(self, node: Node, snapshot: Snapshot) -> Rank:
        """Rank of a snapshot that `node` has, or could get."""
        return Rank(None, 0, -1.0 if snapshot.is_superseded else snapshot.used_at)

    def worth(self, rank: Rank, now: int) -> float:
        """What has that rank is worth so much at clock value `now`."""
        rate = self.rates.rate(rank.kind, now // ADMISSION - rank.since)
        return rate * rank.value

    def expected_tokens(self, node: Node, snapshot: Snapshot, now: int) -> float:
        """Tokens that a snapshot is expected to save by admission; 0 if unknown."""
        return 0.0

    def held_bytes(self, pages: float, snapshots: float, page_size: int) -> float:
        """Bytes of pages and snapshots; 0 where the policy does not know."""
        return 0.0

    def worth_of_drafts(self, saved: float, slots: int, since: int) -> float:
        """What the slots are worth in which a sequence verifies its drafts.

        Args:
            saved: tokens, by admission, whose prefill takes as long as what they save.
            slots: that it needs for that.
            since: clock value of its admission: here, older content is worth less.
        """
        return float(since)

    def repays_pass(
        self,
        kind: SnapshotKind,
        saved: int,
        *,
        origin: SnapshotKind | None,
        running: int,
    ) -> bool:
        """Whether a planned snapshot is worth the forward pass that it costs.

        Args:
            kind: of its position.
            saved: tokens that each use of it would save.
            origin: kind of the snapshot that its sequence resumes from, if any.
            running: number of other sequences, which the pass computes for as well.
        """
        return saved * (1 + running) >= PASS_TOKENS

    def used(self, node: Node, now: int) -> None:
        """Called before a sequence resumes from the snapshot of `node`."""

    def evicted(self, node: Node, now: int) -> None:
        """Called before the snapshot of a node is evicted, or its KV without one."""


class ExpectedSaving(LeastRecentlyUsed):
    """Worth is the prefill that content is expected to save, per byte and admission.

    A snapshot saves the prefill from the nearest snapshot before it to its own
    position.  It holds its slot, and the KV in between: without the snapshot this KV is
    useless, and the snapshot without the KV.  KV that several snapshots need is divided
    among them (`Node.share`).  How often a snapshot is used is learned (`ReuseModel`)
    by class (`reuse_classes`).  A use that an application promised within a TTL counts
    as certain, as far as promises were kept lately.

    KV without a snapshot behind it saves nothing: the next sequence computes it again.
    It only shows where that one branches off, which then takes a snapshot there.  So it
    goes before all else, the oldest first.  If it were worth anything, elastic pools
    would give it the memory of snapshots that are worth less, and not get it back: its
    pages share granules with pages in use.
    """

    def __init__(
        self,
        *,
        token_bytes: float,
        slot_bytes: float,
        pass_tokens: int = PASS_TOKENS,
        passes_are_shared: bool = True,
    ) -> None:
        """Create the policy.

        Args:
            token_bytes: KV of a token.
            slot_bytes: states of a sequence.
            pass_tokens: tokens whose prefill takes as long as a pass of few tokens.
            passes_are_shared: whether a pass that prefills decodes for others as well,
                so that a pass more for a pause is a step of theirs.
        """
        self.pass_tokens = pass_tokens
        self._passes_are_shared = passes_are_shared
        self.token_bytes = token_bytes
        self.slot_bytes = slot_bytes
        self.ttls = Ttls()
        self.rates = self.reuse = ReuseWithTtls(self.ttls)

    def leaf(self, node: Node) -> Rank:
        """Its worth is the expected tokens saved per byte and admission."""
        if node.snapshot is not None:
            return self.snapshot(node, node.snapshot)
        return Rank(KV_ALONE, node.used_at // ADMISSION, 0.0)

    def snapshot(self, node: Node, snapshot: Snapshot) -> Rank:
        """Its worth is the expected tokens saved per byte and admission."""
        held = self.slot_bytes
        if not snapshot.is_superseded:  # otherwise its successor needs the KV as well
            held += self.token_bytes * node.share()
        value = (node.end - node.resume_before()) / max(held, 1.0)
        return Rank(class_of(snapshot), snapshot.used_at // ADMISSION, value)

    def expected_tokens(self, node: Node, snapshot: Snapshot, now: int) -> float:
        """Tokens that a snapshot is expected to save by admission."""
        age = admissions_between(snapshot.used_at, now)
        rate = self.reuse.rate(class_of(snapshot), age)
        return rate * (node.end - node.resume_before())

    def worth_of_drafts(self, saved: float, slots: int, since: int) -> float:
        """What they save by byte and admission, as for all content."""
        return saved / max(slots * self.slot_bytes, 1.0)

    def held_bytes(self, pages: float, snapshots: float, page_size: int) -> float:
        """Bytes of pages and snapshots."""
        return self.token_bytes * page_size * pages + self.slot_bytes * snapshots

    def repays_pass(
        self,
        kind: SnapshotKind,
        saved: int,
        *,
        origin: SnapshotKind | None,
        running: int,
    ) -> bool:
        """Whether all uses of a snapshot are expected to save a pass's worth of tokens.

        A snapshot that is used once may be used again, and so on.  The cost of a pass
        that also decodes for others is divided among them.  Where others wait for it,
        it delays all of them, as the tokens would that a use saves.
        """
        again = min(self.reuse.chance(used_class(kind)), _MOST)
        first = self.reuse.chance(unused_class(kind, origin))
        uses = first / (1.0 - again)
        sharing = 1 + running if self._passes_are_shared else 1
        return uses * saved * sharing >= self.pass_tokens

    def used(self, node: Node, now: int) -> None:
        """Learn from a use."""
        self._observe(node, now, used=True)

    def evicted(self, node: Node, now: int) -> None:
        """Learn how long content was not used."""
        self._observe(node, now, used=False)

    def _observe(self, node: Node, now: int, *, used: bool) -> None:
        if node.snapshot is not None:
            age = admissions_between(node.snapshot.used_at, now)
            kind = class_of(node.snapshot)
            self.reuse.observe(kind, age, now // ADMISSION, used=used)


_MOST = 0.999
