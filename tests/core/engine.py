# SPDX-License-Identifier: Apache-2.0
"""A fake engine: schedules like vLLM, computes on a `FakeDevice`.

The calls and their order are those of `hybrid_plugin/vllm/scheduler.py` and
`manager.py`: running sequences grow first, the last one is preempted where
there is no room; then waiting ones are admitted; the commands are drained and
run before the forward pass; only then the cache hears of the progress.

Tokens that a sequence generates are settled beforehand, but the engine
*receives* them later: at once, or with one more step in flight (`lagging`),
so that a sequence may end when more of its tokens are computed than known.

With drafts, which of them are right is settled when a step runs, and known to
the device at once: the engine counts all as computed until the output comes.
A sequence's end is a stop, which may lie within what a step accepts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import TypeVar

from hybrid_plugin.core.cache import Admission, HybridCache, LookUp
from hybrid_plugin.core.commands import Pool
from hybrid_plugin.core.policy.in_batch_sharing import (
    InBatchPrefixSharing,
    Prefill,
    waiting_prefill,
)
from hybrid_plugin.core.tiers.fetches import Fetching
from hybrid_plugin.core.tiers.outer import Awaited
from hybrid_plugin.core.tiers.saves import Saving
from hybrid_plugin.core.tree.tokens import Pages
from tests.core.audit import audit, cached_content, full_state, restores_of
from tests.core.device import FakeDevice, Forward, Prefixes
from tests.core.outer import FakePeers, FakeRanks, FakeTier
from tests.core.requests import Access, Output, Request
from tests.core.setups import Setup
from tests.core.support import Tokens

T = TypeVar("T")

ANY_TOKEN, WRONG_TOKEN = 7, -1
"""What comes behind the end of a request, and what comes nowhere."""


class FakeEngine:
    """Drives a cache, and checks every step against the fake device."""

    def __init__(self, setup: Setup, cls: type[HybridCache] = HybridCache) -> None:
        self.setup = setup
        self.cache = setup.build(cls)
        self.device = FakeDevice(
            setup.all_pages,
            setup.slots if setup.has_states else 0,
            setup.page_size,
            setup.window_pools,
            setup.grid,
            setup.chunk,
            setup.host,
        )
        self.ranks = self._build_ranks()
        """What outer tiers have done, if there are any."""
        self.following = InBatchPrefixSharing(self.cache)
        self.prefixes = Prefixes()
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.outputs: list[list[Output]] = []
        """What each step in flight generates."""
        self.luck = random.Random(repr(setup))
        """Decides how many drafts there are, and which are right."""
        self.passes = self.scratch_pass = 0
        """Forward passes, and the last of them that verified in the scratch."""
        self.finished = 0
        self.watch_refusals = True
        """Whether to compare the full state around calls that may refuse."""
        self.counts_ends = True
        """Whether to check that the cache keeps each last state that there is."""
        self.now = 0.0
        self.saves: list[Saving] = []
        """Those that are not over."""
        self.saved = 0
        """Saves that were over, and had what they should."""
        self._submitted = 0
        self._work: dict[Request, int] = {}
        self._drafts: dict[Request, int] = {}
        """Of requests in `_work` whose step is noted, the drafts that it verifies."""
        self._planned: dict[Request, int] = {}
        """Of running requests whose step is noted, the drafts that may be in it."""

    def _build_ranks(self) -> FakeRanks | None:
        """Ranks that work on the host rows of the device."""
        host, setup = self.device.host, self.setup
        if not (setup.outer_bytes or setup.peers) or host is None:
            return None
        luck = random.Random(f"ranks/{setup!r}")
        return FakeRanks(host, setup.page_size, luck, setup.trouble)

    # -------------------------------------------------------------- operations

    def submit(
        self,
        tokens: Tokens,
        prompt_length: int,
        *,
        namespace: Hashable = None,
        access: Access = Access.NORMAL,
        limit: int | None = None,
        ttl: float | None = None,
        named: tuple[int, ...] = (),
    ) -> None:
        """Queue a request whose last `len(tokens) - prompt_length` are generated."""
        assert 0 < prompt_length < len(tokens) <= self.setup.max_length
        self._submitted += 1
        seq_id = f"r{self._submitted}"
        request = Request(
            seq_id, tokens, namespace, access, [], prompt_length, limit, ttl, named
        )
        request.history = self._history(request)
        self.waiting.append(request)
        if self.setup.peers and access is Access.NORMAL and self.luck.random() < 0.5:
            self._prefetch(request)

    def _prefetch(self, request: Request) -> None:
        """Begin to fetch what peers have of a request that has just come."""
        fetch = self.cache.lower_tiers.prefetch(self._look_up(request))
        if fetch is not None:
            assert fetch.length < request.known
            request.restore = fetch
            self.cache.lower_tiers.join(fetch)

    def _history(self, request: Request) -> list[int]:
        """Numbers of its prefixes, and of what steps compute beyond them."""
        private = request.access is Access.PRIVATE
        meaning = (request.seq_id,) if private else request.namespace
        beyond = (ANY_TOKEN,) * self.setup.overrun
        return self.prefixes.history(meaning, (*request.tokens, *beyond))

    def step(self, budget: int, victim: int = -1) -> None:
        """Schedule and run one step of at most `budget` tokens.

        Args:
            budget: tokens in the step.
            victim: index of the running request to preempt for want of room.
        """
        if len(self.outputs) > int(self.setup.lagging):
            self.receive()
        self._hear_of_io()
        self._work, self._drafts = {}, {}
        self._plan_width()
        preempted, budget = self._schedule_running(budget, victim)
        if not preempted:
            self._schedule_waiting(budget)
        if self.setup.hears_first:
            self.receive()
        for request, end in self._work.items():
            self.cache.cross(request.seq_id, end)
        self.cache.trim_scratch(len(self._work))
        commands = self.cache.drain_commands()
        self._check_saves()
        self.device.run(commands)
        self._do_io()
        work = enumerate(self._work.items())
        parts = {one: self._forward(one, end, row) for row, (one, end) in work}
        self.device.forward(list(parts.values()))
        self.passes += 1
        self.outputs.append([])
        for request, part in parts.items():
            self._launched(request, part)
        if not self.setup.lagging:
            self.receive()

    def _launched(self, request: Request, part: Forward) -> None:
        """Note that a request's part of a step runs."""
        drafts = self._drafts.get(request)
        if drafts is None:
            request.computed = part.end
            if self._has_sampled(request):
                self.outputs[-1].append(Output(request))
            self._advance(request, part.end)
            return
        if not self.cache.is_verifying(request.seq_id):
            request.counted = request.final = part.start
        self._verify(request, part, drafts)
        last_of_prompt = self.cache.is_prefilling(request.seq_id)
        self._advance(request, part.start + 1 if last_of_prompt else request.final)

    def _verify(self, request: Request, part: Forward, drafts: int) -> None:
        steps = part.accepted
        self._note(request, drafts, part.row)
        request.counted += 1 + drafts
        request.computed += 1 + len(steps)
        request.unseen += 1 + len(steps)
        request.selected = len(steps) if self.setup.in_slots else 0
        request.last_pass = self.passes
        if self.setup.scratch:
            self.scratch_pass = self.passes
        self.outputs[-1].append(Output(request, drafts, steps))

    def _note(self, request: Request, drafts: int, row: int | None) -> None:
        seq_id, known = request.seq_id, request.known if request.heard else None
        self.cache.verify(seq_id, request.counted, drafts, row=row, known=known)

    def _advance(self, request: Request, final: int) -> None:
        request.trimmed = final = max(final, request.trimmed)
        if self.cache.is_prefilling(request.seq_id):
            self.cache.advance(request.seq_id, final)
        else:
            self.cache.trim(request.seq_id, final)

    def _do_io(self) -> None:
        """Let the ranks do some of what they were told."""
        if self.ranks is not None:
            for _ in range(self.ranks.rng.choice((0, 1, 1, 2))):
                self.ranks.work()

    def _hear_of_io(self) -> None:
        """Report some of what the ranks have done."""
        if self.ranks is not None:
            # Each time before more is heard, such as that a file of theirs is gone.
            self._check_saves()
            for _ in range(self.ranks.rng.choice((0, 1, 1, 2))):
                for _ in self.ranks.report(self.cache):
                    self._check_saves()

    def save(self, tokens: Tokens, namespace: Hashable) -> None:
        """Have what can be resumed of a sequence in the outer tier."""
        saving = self.cache.lower_tiers.save(tokens, namespace)
        if saving is not None:
            self.saves.append(saving)
        self._check_saves()

    def bring(self, tokens: Tokens, namespace: Hashable) -> None:
        """Have what the outer tier has of a sequence on the host."""
        fetch = self.cache.lower_tiers.bring(tokens, namespace)
        assert fetch is None or fetch.length > self.cache.lower_tiers.resumable(
            tokens, namespace
        )

    def _check_saves(self) -> None:
        """What is saved is found, and what is not says why."""
        for saving in [one for one in self.saves if one.is_over]:
            self.saves.remove(saving)
            if saving.reason:
                continue
            (tier,) = [one for one in self.cache.lower_tiers.outer if one.keeps_bundles]
            found = tier.find(saving.namespace, saving.tokens, saving.length)
            assert found and found[-1].end == saving.length, "it is not there"
            self.saved += 1

    @property
    def has_io(self) -> bool:
        """Whether there is anything left to do for outer tiers."""
        if self.ranks is None or self.device.host is None:
            return False
        outer = (
            self.cache.lower_tiers.fetching
            + self.cache.lower_tiers.writing
            + self.cache.lower_tiers.offering
        )
        return bool(outer or self.cache._commands or self.device.host.queue)

    def check_files(self) -> None:
        """Check that, with nothing left to do, files are there for what is found."""
        if self.ranks is None:
            return
        for tier in self.cache.lower_tiers.outer:
            assert isinstance(tier, FakeTier | FakePeers)
            waits = tier.begun or self.ranks.reports or self.saves
            assert not waits, "somebody waits for ever"
            if isinstance(tier, FakeTier):
                files = set(self.ranks.files)
                assert set(tier.entries) == files, "files leak, or are missing"

    def pass_time(self, seconds: float) -> None:
        """Let time pass; it only changes what is worth how much."""
        self.now += seconds
        due = self.cache.lower_tiers.restores_due
        before = cached_content(self.cache)
        self.cache.pass_time(self.now)
        if due is None or due > self.now:
            assert cached_content(self.cache) == before
        for restore in restores_of(self.cache):
            assert restore.due > self.now or restore.waiters, "a restore never ends"

    def receive(self) -> None:
        """Take the outputs of the oldest step in flight."""
        for output in self.outputs.pop(0) if self.outputs else ():
            request = output.request
            if output.drafts is not None:
                self._accept(request, output)
                request.counted -= self._rejected(output)
                request.final += output.tokens
                request.heard = True
            request.unseen -= output.tokens
            request.known = min(request.known + output.tokens, len(request.tokens))
            if request.known == len(request.tokens):
                self.end(request)
                self.finished += 1

    def _accept(self, request: Request, output: Output) -> None:
        columns = output.steps if self.setup.scratch else None
        self.cache.accept(request.seq_id, len(output.steps), columns)

    def _rejected(self, output: Output) -> int:
        return (output.drafts or 0) - len(output.steps)

    def end(self, request: Request) -> None:
        """Finish or abort a request, wherever it is."""
        if request in self.waiting:
            self.waiting.remove(request)
            self._forget_restore(request)
            return
        self._finish(request, preempted=False)

    def preempt(self, request: Request) -> None:
        """Send a running request back to the queue."""
        self._finish(request, preempted=True)
        request.computed, request.table, request.slot = 0, [], 0
        request.columns, request.selected, request.heard = [], 0, False
        request.preemptions += 1
        self.waiting.insert(0, request)

    def _finish(self, request: Request, *, preempted: bool) -> None:
        noted = self.cache.is_verifying(request.seq_id)
        stats, exact = self.cache.stats, self._has_exact_state(request, noted=noted)
        expected = {
            "turn_ends_exact": stats.turn_ends_exact + (exact is True),
            "turn_ends_missed": stats.turn_ends_missed + (exact is False),
        }
        if request.ttl == 0 and not preempted:
            exact = None
        self._forget_outputs(request)
        self._work.pop(request, None)
        self._drafts.pop(request, None)
        self.running.remove(request)
        computed = None if noted else request.computed
        self.cache.finish(
            request.seq_id, request.known_tokens, computed, preempted=preempted
        )
        if self.setup.peers and not preempted and self.luck.random() < 0.5:
            self._offer(request)
        if exact is not None and self.counts_ends:
            done = stats.as_dict()
            found = {name: done[name] for name in expected}
            assert found == expected, f"{found}, not {expected}"

    def _offer(self, request: Request) -> None:
        """Offer what the host has of a request, or of its beginning."""
        end = self.luck.randint(1, request.known)
        before = cached_content(self.cache)
        private = request.access is Access.PRIVATE
        key = self.cache.lower_tiers.offer(
            request.namespace, request.known_tokens[:end]
        )
        assert cached_content(self.cache) == before, "what is cached stays cached"
        if key is not None and not private:
            assert self.cache.lower_tiers.has_unsent_offers

    def _has_exact_state(self, request: Request, *, noted: bool) -> bool | None:
        """Whether there is a state of all known tokens; None if nobody wants one."""
        setup, known = self.setup, request.known
        if not setup.has_states or setup.canonical:
            return None
        if not self.cache.sequence(request.seq_id).cacheable:
            return None
        if not noted:
            return request.computed <= known if request.computed else None
        in_flight = [o.request for step in self.outputs for o in step].count(request)
        intact = setup.in_slots or request.last_pass == (
            self.scratch_pass if setup.scratch else self.passes
        )
        if not in_flight:
            return intact or known >= request.final
        return intact and in_flight == 1 and known == request.final + 1

    def flush(self) -> None:
        """Forget what is cached; refused while a request runs."""
        before = full_state(self.cache)
        flushed = self.cache.flush()
        assert flushed == (not self.running)
        if not flushed:
            assert full_state(self.cache) == before
        elif self.ranks is not None:
            self._exchange_weights()

    def _exchange_weights(self) -> None:
        """Have equal tokens give other content from now on."""
        self.prefixes = Prefixes(self.prefixes.first + 1_000_000)
        for request in self.waiting:
            request.history = self._history(request)

    def evict_all(self) -> None:
        """Evict what nobody uses from the device and the host, as a restart would."""
        cache = self.cache
        while cache.memory.evict_pages(1_000) or cache.memory.evict_snapshot():
            pass
        host = cache.host
        while host is not None and host.memory.evict_pages(1_000):
            pass

    def check(self) -> None:
        """Check all invariants, and everything the tree offers."""
        audit(self.cache)
        self.device.check_tree(self.cache, self.prefixes)
        for request in self.running:
            self._check_windows(request)

    def _check_windows(self, request: Request) -> None:
        """No page is held that no token to come looks at."""
        tables = self.cache.sequence(request.seq_id).windows
        for group, table in zip(self.cache.windows, tables, strict=True):
            first = group.window.first_needed(request.trimmed) // self.setup.page_size
            assert table.first == min(first, len(table.pages)), "a window grows"

    # ---------------------------------------------------------------- schedule

    def _plan_width(self) -> None:
        """Decide how many drafts the running requests may verify in the step."""
        planned = {one: self._plan_drafts(one) for one in self.running}
        self._planned = {one: n for one, n in planned.items() if n is not None}
        if not self.setup.drafts or self.setup.scratch:
            return
        cache, wanted = self.cache, {}
        for request, drafts in self._planned.items():
            if drafts:
                wanted[request.seq_id] = drafts
        growth = {one.seq_id: self._covered(one) for one in self.running}
        waits = cache.drafts._refused_now or cache.drafts._refused_before
        width = cache.lend_drafts(wanted, growth, self.setup.lookahead)
        assert not (width and waits), "slots are lent that others wait for"
        for request in self.running:
            before = request.columns
            request.columns = list(cache.sequence(request.seq_id).drafts)
            count = len(request.columns)
            most = min(wanted.get(request.seq_id, 0), width) * cache.drafts.need_slots
            assert count >= most, "not all alike"
            assert count == most or request.columns == before[:count], "more than all"
        for request, drafts in self._planned.items():
            self._planned[request] = min(drafts, width)

    def _plan_drafts(self, request: Request) -> int | None:
        """How many drafts a step should verify; None if it is not to be noted."""
        one, luck = request.computed + 1, self.luck
        if not self.setup.drafts or one != request.known + request.unseen:
            return None
        if not self.setup.in_slots and self.cache.is_prefilling(request.seq_id):
            return None
        drafts = 0 if luck.random() < 0.2 else luck.randint(1, self.setup.drafts)
        noted = self.cache.is_verifying(request.seq_id)
        return drafts if drafts or noted or luck.random() < 0.3 else None

    def _covered(self, request: Request) -> int:
        """Tokens that a request needs pages for in a step without drafts."""
        tokens = request.known + request.unseen
        if self.cache.is_verifying(request.seq_id):
            tokens = request.counted + 1
        return tokens + self.setup.lookahead

    def _schedule_running(self, budget: int, victim: int) -> tuple[bool, int]:
        preempted = False
        for request in list(self.running):
            if budget <= 0 or request not in self.running:
                continue
            end = self._next_end(request, request.computed, budget)
            if end == request.computed:
                continue
            drafts = self._planned.get(request)
            while (fresh := self._grow(request, end, drafts)) is None:
                loser = self.running[victim % len(self.running)]
                budget += self._work.get(loser, loser.computed) - loser.computed
                assert not self.setup.canonical, "a sequence has no room reserved"
                self.preempt(loser)
                preempted = True
                if loser is request:
                    break
            if fresh is not None:
                request.table += fresh
                self._plan(request, end, drafts)
                budget -= end - request.computed
        return preempted, budget

    def _plan(self, request: Request, end: int, drafts: int | None) -> None:
        """Take a request into the step."""
        self._work[request] = end
        if drafts is not None:
            self._drafts[request] = drafts

    def _grow(self, request: Request, end: int, drafts: int | None) -> Pages | None:
        attempt = self.cache.grow
        if drafts is not None and request.counted:
            end = request.counted + 1
        num_tokens = end + (drafts or 0) + self.setup.lookahead
        fresh = self._watch(lambda: attempt(request.seq_id, num_tokens))
        if fresh is None:
            self._check_growth(request, num_tokens, drafts or 0)
        if fresh is None and len(self.running) == 1:
            assert self._is_scattered(), "a sequence alone finds no room"
            least, before = request.refused_alone
            further = num_tokens > least or request.preemptions > before + 1
            assert further, "it is preempted for ever"
            request.refused_alone = num_tokens, request.preemptions
        return fresh

    def _is_scattered(self) -> bool:
        """Whether what runs pins memory of which it uses a part."""
        return False

    def _check_growth(self, request: Request, tokens: int, drafts: int) -> None:
        """Nobody is preempted for drafts: neither for their tokens nor their slots.

        What sits out a step keeps its slots, because its next step selects one of them.
        """
        cache, size = self.cache, self.setup.page_size
        if not self.setup.in_slots or not cache.slots.needed:
            return
        held = len(cache.sequence(request.seq_id).pages)
        count = -(-(tokens - drafts) // size) - held
        wanted = dict.fromkeys(cache.memory.page_pools, count)
        returned = {Pool.STATE: cache.slots.draft_ids()}
        paused = any(o.columns and o.last_pass < self.passes for o in self.running)
        makes_room = cache.broker.fits(wanted, None, returned)
        counted = not makes_room or self._is_scattered()
        assert paused or counted, "drafts have not made way"

    def _schedule_waiting(self, budget: int) -> None:
        self._plan_following()
        for request in list(self.waiting):
            if budget <= 0 or len(self.running) == self.setup.max_running:
                return
            if self.following.holds(request.seq_id) or self._awaits_restore(request):
                continue
            found = self._look_up(request)
            hit = found.match.length
            assert hit < request.known, "nothing is left to compute"
            whole = min(hit + budget, request.known)
            end = self.cache.chunk_end(
                found.snapshot_positions, hit, whole, request.known
            )
            if end == hit:  # waits for a larger budget
                assert self.setup.canonical and budget <= self.setup.chunk
                return
            assert end > 1 or whole == 1, "a split leaves a first chunk of one token"
            drafts = self._plan_first_drafts(request, hit, end)
            admission = self._admit(request, found, end + (drafts or 0))
            if admission is None and not self.running:
                assert hit and not self._look_up(request).match.length, "it is refused"
                return
            if admission is None:
                self._check_refusal(request, found, end + (drafts or 0))
                return
            self._take_in(request, admission, end, drafts)
            budget -= end - hit

    def _awaits_restore(self, request: Request) -> bool:
        """Whether a request waits for what other tiers have of it."""
        if self.setup.host is None or request.access is not Access.NORMAL:
            return False
        if request.restore is not None and not request.restore.is_over:
            if not self.cache.lower_tiers.is_restored(request.restore):
                return self._waits(request.restore)
            if request.restore.is_over:
                return False
            self._forget_restore(request)  # a fetch takes too long
        self._check_kept(request)
        found = self._look_up(request)
        restore = self.cache.lower_tiers.restore(found, after=request.restore)
        if restore is None:
            return False
        assert found.match.length < restore.length < request.known
        assert not restore.is_over or not self.running, "others are held up"
        before, request.restore = request.restore, restore
        self.cache.lower_tiers.join(restore)
        if before is not None:
            self.cache.lower_tiers.leave(before)
        if self.cache.lower_tiers.is_restored(restore):
            return False
        return self._waits(restore)

    def _check_kept(self, request: Request) -> None:
        """What was fetched for a request is there when it comes for it."""
        fetch, host = request.restore, self.cache.host
        if isinstance(fetch, Fetching) and not fetch.reason and not fetch.is_flushed:
            assert host is not None, "it was fetched there"
            kept = host.match(fetch.namespace, fetch.tokens, fetch.length)
            assert kept.length == fetch.length, "what was fetched for it is gone"

    def _waits(self, awaited: Awaited) -> bool:
        comes = isinstance(awaited, Fetching)
        assert self.running or comes, "all wait for a restore"
        return True

    def _forget_restore(self, request: Request) -> None:
        if request.restore is not None:
            self.cache.lower_tiers.leave(request.restore)
            request.restore = None

    def _check_refusal(self, request: Request, found: LookUp, end: int) -> None:
        """Whoever is refused for want of a slot alone gets one that drafts hold."""
        cache, size = self.cache, self.setup.page_size
        if cache.broker.moves_memory or cache.windows or not cache.drafts_held:
            return
        tokens = max(end + self.setup.lookahead, self._reserve(request))
        pages = -(-tokens // size) + self.setup.watermark + cache.promised_pages()
        if cache.pages.free >= pages:
            assert cache.drafts_wanted_back, "an admission waits for drafts"

    def _plan_first_drafts(self, request: Request, hit: int, end: int) -> int | None:
        """0 if a request's first step is noted, where its hit leaves a single token."""
        wants = self.setup.drafts and self.setup.in_slots
        wants = wants and end == hit + 1 == request.known
        return 0 if wants and self.luck.random() < 0.5 else None

    def _plan_following(self) -> None:
        normal = [r for r in self.waiting if r.access is Access.NORMAL]
        self.following.plan([(r.seq_id, partial(self._prefill, r)) for r in normal])
        held = [r for r in self.waiting if self.following.holds(r.seq_id)]
        assert not held or len(held) < len(self.waiting + self.running), "none leads"

    def _prefill(self, request: Request) -> Prefill:
        return waiting_prefill(
            self.cache, request.seq_id, request.known_tokens, request.namespace
        )

    def _look_up(self, request: Request) -> LookUp:
        tokens, namespace = request.known_tokens, request.namespace
        if request.access is not Access.NORMAL:
            return self.cache.bypass(tokens, namespace, ttl=request.ttl)
        return self.cache.look_up(
            tokens,
            namespace,
            request.limit,
            snapshot_at=request.named,
            pause_at=self.following.pauses_of(request.seq_id),
            ttl=request.ttl,
        )

    def _admit(self, request: Request, found: LookUp, end: int) -> Admission | None:
        attempt = self.cache.admit
        return self._watch(
            lambda: attempt(
                request.seq_id,
                found,
                num_tokens=end + self.setup.lookahead,
                reserve_tokens=self._reserve(request),
                watermark_pages=self.setup.watermark if self.running else 0,
                cacheable=request.access is not Access.PRIVATE,
                resumed=request.preemptions > 0,
            )
        )

    def _reserve(self, request: Request) -> int:
        if self.setup.canonical:  # nobody may be preempted
            return len(request.tokens) + self.setup.lookahead
        return request.known if self.setup.full_fit else 0

    def _take_in(
        self, request: Request, admission: Admission, end: int, drafts: int | None
    ) -> None:
        self.waiting.remove(request)
        self._forget_restore(request)
        self.running.append(request)
        request.table, request.slot = list(admission.pages), admission.slot
        request.computed = request.trimmed = admission.hit
        request.counted = 0
        self._plan(request, end, drafts)

    def _next_end(self, request: Request, start: int, budget: int) -> int:
        target = request.known + request.unseen
        if not self.cache.is_verifying(request.seq_id):
            target = min(target, len(request.tokens))
        stops = self.cache.snapshot_positions_of(request.seq_id)
        end = min(start + budget, target)
        return self.cache.chunk_end(stops, start, end, request.known)

    # ---------------------------------------------------------------- internal

    def _watch(self, call: Callable[[], T | None]) -> T | None:
        """Make a call that may refuse; refusing must change nothing."""
        if not self.watch_refusals:
            return call()
        before, restores = full_state(self.cache), restores_of(self.cache)
        emptied = self.cache.stats.pools_emptied
        result = call()
        if self.cache.stats.pools_emptied > emptied:
            assert not self.running, "others lose what they share"
        elif result is None and restores == restores_of(self.cache):
            assert full_state(self.cache) == before
        return result

    def _forward(self, request: Request, end: int, row: int) -> Forward:
        sequence = self.cache.sequence(request.seq_id)
        plain = Forward(
            tuple(request.table),
            request.slot,
            request.history,
            request.computed,
            end,
            tuple(tuple(group.pages) for group in sequence.windows),
            sequence.prompt_length,
        )
        drafts = self._drafts.get(request)
        if drafts is None:
            return plain
        columns = replace(
            plain, columns=tuple(request.columns), selected=request.selected
        )
        return self._with_drafts(columns, drafts, row)

    def _with_drafts(self, part: Forward, drafts: int, row: int) -> Forward:
        """The same, with drafts of which some are right."""
        luck, count = self.luck, 0
        while count < drafts and luck.random() < self.setup.acceptance:
            count += 1
        written = list(part.history[part.start + 1 : part.start + 2 + count])
        while len(written) <= drafts:
            written.append(self.prefixes.extend(written[-1], None, WRONG_TOKEN))
        tree = self.setup.scratch
        steps = (
            luck.sample(range(1, drafts + 1), count) if tree else range(1, count + 1)
        )
        accepted = sorted(steps)
        wrong = [step for step in range(1, drafts + 1) if step not in accepted]
        order = [0, *accepted, *wrong]
        verified = [number for _, number in sorted(zip(order, written, strict=True))]
        return replace(
            part,
            end=part.end + drafts,
            written=tuple(written),
            verified=tuple(verified),
            accepted=tuple(accepted),
            row=row if tree else None,
            recorded=self.setup.records,
        )

    def _has_sampled(self, request: Request) -> bool:
        sampled = request.computed == request.known + request.unseen
        if sampled and request.computed < len(request.tokens):
            request.unseen += 1
            return True
        return False

    def _forget_outputs(self, request: Request) -> None:
        request.unseen = 0
        self.outputs = [
            [o for o in s if o.request is not request] for s in self.outputs
        ]
