# SPDX-License-Identifier: Apache-2.0
"""LowerTiers: what an adapter may ask of the tiers below the device, in one object.

The first is host memory, from which prefixes are restored to the device; behind it are
outer tiers, such as a disk, from which they are fetched to the host first.  Each may be
missing: then there is nothing to wait for, and every question has that answer.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

from hybrid_plugin.core.commands import PoolId
from hybrid_plugin.core.memory.cache_memory import CacheMemory
from hybrid_plugin.core.memory.fragmentation import FragmentationRelief
from hybrid_plugin.core.sequence import LookUp
from hybrid_plugin.core.stats import PoolLevel
from hybrid_plugin.core.tiers.fetches import Fetching
from hybrid_plugin.core.tiers.host_tier import HostTier
from hybrid_plugin.core.tiers.outer import Awaited, OuterTiers, Recording
from hybrid_plugin.core.tiers.outer_tier import OuterTier
from hybrid_plugin.core.tiers.restores import Needs, Restore, Restores, TransferRates
from hybrid_plugin.core.tiers.saves import Saving
from hybrid_plugin.core.tree.node import Node
from hybrid_plugin.core.tree.radix import Match
from hybrid_plugin.core.tree.tokens import Tokens, as_tokens


class LowerTiers:
    """The tiers below the device of one cache, and what is on its way between them."""

    def __init__(
        self,
        memory: CacheMemory,
        fragmentation: FragmentationRelief,
        *,
        host: HostTier | None,
        rates: TransferRates | None,
        running: Callable[[], int],
        needs: Needs,
    ) -> None:
        """Begin with nothing on its way.

        Args:
            memory: of the device.
            fragmentation: while it makes room, nothing is restored.
            host: rows of host memory; None for none.
            rates: how fast they are loaded, and prompts computed; for a host tier.
            running: number of live sequences.
            needs: how many ids of the device's pools must be free for a restore.

        Raises:
            ValueError: for a host tier without rates, or for a model whose cache needs
                no snapshots.
        """
        self.host = host
        self.rates = rates
        self.outer: tuple[OuterTier, ...] = ()
        """What is behind the host, in the order in which they are asked."""
        self._memory = memory
        self._tree = memory.tree
        self._pace = memory.promises.pace
        self._fragmentation = fragmentation
        self._running = running
        self._needs = needs
        self._outer: OuterTiers | None = None
        self._restores: Restores | None = None
        if host is None:
            return
        if rates is None or not self._tree.needs_snapshots:
            raise ValueError(
                "a host tier needs measured rates, and a model with state layers or "
                "attention windows"
            )
        host.send_to(memory.enqueue)
        self._restores = Restores(memory, host, rates)

    def use_outer(self, tiers: Sequence[OuterTier]) -> None:
        """Have outer tiers behind the host, where they can be built only now.

        Args:
            tiers: in the order in which they are asked.

        Raises:
            ValueError: without a host tier, if there are some already, or for tiers
                that cannot go together.
        """
        if self.host is None or self.rates is None or self._outer is not None:
            raise ValueError("outer tiers need a host tier, and come once")
        self._outer = OuterTiers(self.host, tiers, self.rates)
        self.outer = self._outer.tiers

    # ------------------------------------------------------------- for a request

    def restore(self, found: LookUp, after: Awaited | None = None) -> Awaited | None:
        """Begin to restore what the tiers have of a waiting sequence beyond its hit.

        Call it for a sequence that could be admitted now.  Where it returns something
        that is not over, the sequence waits, and is looked up again when it is: the
        time must pass (`HybridCache.pass_time`), outcomes must be reported (`done`), or
        everything else must end.  If the sequence is counted in its `waiters` (`join`),
        ask by `is_restored`.  Sequences that wait for the same prefix get the same.
        What is on the host is restored to the device; what is behind it is fetched to
        the host first.  Either begins only if it is over before the tokens are
        computed, and takes no memory of the device that the admission would not take.

        Args:
            found: its look-up, not older than the step.
            after: what the sequence waited for last, if anything.  If what a restore
                brought is gone already, the sequence does not wait again; nothing is
                fetched twice in a row.

        Returns:
            What to wait for; one that is over asks for another look-up at once.  None
            if the sequence should be admitted as it is.
        """
        restores = self._restores_for(found)
        if restores is None:
            return None
        if self._fragmentation.begins or self._fragmentation.holds_back:
            return None
        if isinstance(after, Restore) and found.match.length < after.length:
            return None
        if not isinstance(after, Fetching):
            fetch = self.prefetch(found)
            if fetch is not None:
                return fetch
        restore = restores.begin(found, self._pace.now, self._needs)
        if restore is not None and not self._running():
            restores.end_all()
        return restore

    def prefetch(self, found: LookUp) -> Fetching | None:
        """Begin to fetch to the host what outer tiers have of a waiting sequence.

        `restore` does it too, for a sequence that could be admitted; here nobody asks
        whether it could.  If something is returned, the sequence waits for it.
        """
        restores = self._restores_for(found)
        if restores is None or self._outer is None:
            return None
        now = self._pace.now
        return self._outer.fetch(found, now, restores.queued(now))

    def join(self, awaited: Awaited) -> None:
        """Count a sequence that has yet to come to something: it is there until then.

        Call `leave` when it was admitted or is over, or waits for something else.
        """
        awaited.waiters += 1

    def leave(self, awaited: Awaited) -> None:
        """Count a sequence no more that `join` has counted."""
        if isinstance(awaited, Fetching):
            self._demanded().left(awaited)
        else:
            awaited.waiters -= 1

    def is_restored(self, awaited: Awaited) -> bool:
        """Whether a sequence that waited for something need not wait for it any more.

        Ends a restore if it should be over, so call it when the sequence could be
        admitted.  Nobody waits for a fetch any more that has taken as long as
        computing would, beside what runs by now, though it is not over.
        """
        now = self._pace.now
        if awaited.is_over or self._restores is None:
            return True
        if isinstance(awaited, Fetching):
            assert self._outer is not None, "who fetches is behind the host"
            self._restores.rates.running = self._running()
            return not self._outer.is_awaited(awaited, now)
        if awaited.due > now:
            return False
        self._restores.end(awaited)
        return True

    def offer(self, namespace: Hashable, tokens: Sequence[int]) -> str | None:
        """Let another server read the longest prefix that there is of a sequence.

        Call it when the sequence has ended.  The host keeps the prefix, whatever else
        it is worth, for it is certain to be used: what the host had refused is stored.
        It stays there until the outcome is reported (`done`), or everything is flushed.

        Args:
            namespace: of the sequence.
            tokens: as many of it as another server can use.

        Returns:
            What that server must know; None if the host has nothing of it, or if there
            is no tier for offers.
        """
        if self._outer is None:
            return None
        assert self.host is not None, "who offers is behind the host"
        prefix = as_tokens(tokens)
        match = self._tree.match(namespace, prefix, len(prefix))
        there = self.host.match(namespace, prefix, len(prefix)).length
        if match.node is not None and match.length > there:
            self.store(match.node, at_any_price=True)
        return self._outer.offer(namespace, prefix)

    def decline(self, key: str) -> None:
        """Have another server be told that what it offers is not needed.

        Args:
            key: of its offer, as the tier finds it.
        """
        assert self._outer is not None, "who offers is behind the host"
        self._outer.decline(key)

    # --------------------------------------------------------------- for a session

    def save(self, tokens: Sequence[int], namespace: Hashable = None) -> Saving | None:
        """Have what can be resumed of a sequence in the outer tier, before all others.

        It goes on while steps are made; what it takes of the host's memory is in use
        until it is over.

        Args:
            tokens: of the sequence; all of them may be resumed.
            namespace: what besides tokens must be equal.

        Returns:
            What becomes of the longest prefix that device, host or outer tier can
            resume; None if there is none.

        Raises:
            ValueError: if no outer tier keeps bundles.
        """
        ids = as_tokens(tokens)
        match = self._tree.match(namespace, ids, len(ids))
        return self._demanded().save(namespace, ids, match.length)

    def bring(
        self, tokens: Sequence[int], namespace: Hashable = None
    ) -> Fetching | None:
        """Begin to fetch a sequence to the host before anybody needs it there.

        Args:
            tokens: of the sequence; all of them may be resumed.
            namespace: what besides tokens must be equal.

        Returns:
            The fetch; None if no tier has more of it than device and host, or if all of
            the host's memory is in use.

        Raises:
            ValueError: if there is no outer tier.
        """
        ids, length = as_tokens(tokens), len(tokens)
        match = self._tree.match(namespace, ids, length)
        version = self._tree.version
        found = LookUp(length, namespace, match, {}, version, ids, limit=length)
        return self._demanded().bring(found, self._pace.now)

    def resumable(self, tokens: Sequence[int], namespace: Hashable = None) -> int:
        """Tokens of a sequence that device or host can resume."""
        ids = as_tokens(tokens)
        on_device = self._tree.match(namespace, ids, len(ids)).length
        if self.host is None:
            return on_device
        return max(on_device, self.host.match(namespace, ids, len(ids)).length)

    def record(
        self, name: str, text: str | None, discard: Sequence[str] = ()
    ) -> Recording:
        """Have a text kept beside the bundles, on all ranks, behind what is written.

        Args:
            name: hexadecimal digits; another text of that name goes.
            text: to keep; None removes it.
            discard: keys of bundles that go before, which nobody finds any more.

        Raises:
            ValueError: if no outer tier keeps bundles.
        """
        return self._demanded().record(name, text, discard)

    def discard(self, keys: Sequence[str]) -> None:
        """Remove bundles that an outer tier does not find any more.

        Args:
            keys: of them, as the tier calls them.
        """
        if self._outer is not None:
            self._outer.discard(keys)

    # --------------------------------------------------------- what is on its way

    def done(
        self,
        ticket: int,
        ok: bool,
        *,
        reason: str = "unknown",
        bundle: int | None = None,
        seconds: float | None = None,
    ) -> None:
        """Take the report on a `Write`, `Fetch` or `Offer`, on which all ranks agree.

        Where each rank has a cache, all of them must hear the same reports, in the same
        order, between the same steps.

        Args:
            ticket: of the command.
            ok: whether every rank has done it.
            reason: in few words, where one has not; failures are counted by it.
            bundle: index of the bundle of a fetch that could not be read, if known.
            seconds: what it took the slowest rank, if measured.

        Raises:
            ValueError: for a ticket that is not out.
        """
        now = self._pace.now
        self._demanded().done(
            ticket, ok, now, reason=reason, bundle=bundle, seconds=seconds
        )

    @property
    def fetching(self) -> int:
        """Fetches that are out: sequences wait, though nothing may run."""
        return 0 if self._outer is None else self._outer.fetching

    @property
    def writing(self) -> int:
        """Writes that are out, or begin with the next commands if the host keeps them.

        No sequence waits for them; but they go on only while steps are made.
        """
        outer = self._outer
        return 0 if outer is None else outer.writing + outer.to_write

    @property
    def offering(self) -> int:
        """Offers that are out: rows of the host are in use, and nobody waits."""
        return 0 if self._outer is None else self._outer.offering

    @property
    def has_unsent_offers(self) -> bool:
        """Whether ranks hear of an offer, or that one is withdrawn or not needed, only
        with the next commands: other servers may wait for it."""
        return self._outer is not None and self._outer.is_unsent

    @property
    def restores_due(self) -> float | None:
        """When the next restore should be over, on the cache's clock; None for none."""
        running = self._restores.running if self._restores is not None else []
        return running[0].due if running else None

    def restoring(self, pool: PoolId) -> int:
        """Ids of a pool that restores alone have in use: they make way for others."""
        return len(self.restoring_ids().get(pool, ()))

    def end_restores(self) -> bool:
        """Have the model's stream wait for all loads: what they bring is ordinary.

        The cache does it by itself in time.  An engine whose cache knows no time calls
        it where all ranks do; False if there was nothing to wait for.
        """
        return self._restores is not None and self._restores.end_all()

    # ------------------------------------------------------------ for the cache

    def restoring_ids(self) -> Mapping[PoolId, Sequence[int]]:
        """Ids that restores alone have in use, by pool; of none if nothing runs."""
        restores = self._restores
        if restores is None or not restores.running:
            return {}
        return restores.held()

    def window_pages(self, index: int) -> int:
        """Pages of a window group that restores have in use."""
        return 0 if self._restores is None else self._restores.window_pages(index)

    def end_last(self) -> bool:
        """Have the restore that began last end now; False if there is none."""
        restores = self._restores
        if restores is None or not restores.running:
            return False
        restores.end(restores.running[-1])
        return True

    def end_due(self) -> None:
        """End the restores that should be over by now."""
        if self._restores is not None:
            self._restores.end_due(self._pace.now)

    def take_restored(self, match: Match) -> tuple[int, tuple[str, int]]:
        """Tokens of a hit that the tiers brought; nobody else is told of them.

        Returns:
            All of them, and the name of the outer tier with its part of them.
        """
        snapshot = match.node.snapshot if match.node is not None else None
        if snapshot is None:
            return 0, ("", 0)
        restored, snapshot.restored = snapshot.restored, 0
        fetched, snapshot.fetched = snapshot.fetched, 0
        return restored, (snapshot.source, fetched)

    def note_use(
        self, found: LookUp, restored: int, brought: tuple[str, int], *, counts: bool
    ) -> None:
        """Tell the tiers of an admission.

        Args:
            found: of the sequence.
            restored: tokens of its hit that the tiers brought.
            brought: the name of the outer tier, and its part of them.
            counts: whether the statistics count it.
        """
        if self.host is None:
            return
        hit = found.match.length
        self.host.used(found.namespace, found.tokens, hit)
        if not counts:
            return
        source, fetched = brought
        missed = found.length - hit + restored
        self.host.stats.queried_tokens += missed
        self.host.stats.hit_tokens += restored - fetched
        for tier in self.outer:
            tier.stats.queried_tokens += missed - restored + fetched
            tier.stats.hit_tokens += fetched * (tier.name == source)

    def store(self, node: Node, *, at_any_price: bool = False) -> None:
        """Have the host keep what can be resumed at a node, if it does not already.

        Args:
            node: with a snapshot, both of which the device has.
            at_any_price: whether anything is evicted for it that is not in use.
        """
        if self.host is None:
            return
        assert node.snapshot is not None, "nothing can be resumed without"
        namespace, tokens, pages = self._tree.path_of(node)
        self.host.store(
            namespace, tokens, pages, node.snapshot, at_any_price=at_any_price
        )

    def before_commands(self) -> None:
        """Begin the writes that may run now: commands are drained next."""
        if self._outer is not None:
            self._outer.before_commands()

    def after_commands(self) -> None:
        """Go on with saves: the device has what its tree says."""
        if self._outer is not None:
            self._outer.go_on_saving(self._store_for_saving)

    def flush(self) -> None:
        """Forget everything that the tiers have."""
        if self._outer is not None:
            self._outer.flush()
        if self.host is not None:
            self.host.clear()

    def levels(self) -> dict[PoolId, PoolLevel]:
        """How full each pool of the host is."""
        return {} if self.host is None else self.host.levels()

    # ---------------------------------------------------------------- internal

    def _restores_for(self, found: LookUp) -> Restores | None:
        """The restores, told how many sequences run; None if a sequence gets none."""
        if self._restores is None or not found.limit:
            return None
        self._restores.rates.running = self._running()
        return self._restores

    def _demanded(self) -> OuterTiers:
        if self._outer is None:
            raise ValueError("there is no outer tier")
        return self._outer

    def _store_for_saving(self, namespace: Hashable, tokens: Tokens) -> None:
        """Have the host keep a prefix that the device can resume, if it has room."""
        match = self._tree.match(namespace, tokens, len(tokens))
        if match.node is not None and match.length == len(tokens):
            self.store(match.node, at_any_price=True)
