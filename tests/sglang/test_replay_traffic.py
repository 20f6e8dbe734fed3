# SPDX-License-Identifier: Apache-2.0
"""Random traffic on records of drafts: each state is the sum of exactly its tokens.

Steps are launched before the results of those before are handled, or not; prompts run
between them; requests end anywhere within what was accepted, are retracted, and go on
in other requests.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("sglang")

from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.mem_cache.allocation_sizing import page_aligned_decode_alloc_lens
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_context

from hybrid_plugin.core.commands import Command, Copy, Pool, Take, Zero
from hybrid_plugin.sglang import token_placement
from hybrid_plugin.sglang.requests import SGLangRequest
from hybrid_plugin.sglang.speculation.replay import records
from hybrid_plugin.sglang.speculation.replay.scratch import ReplayScratch
from tests.sglang.fakes import PAGE, Batch, Bench, request

WIDTH, SLOTS, STEPS = 4, 9, 30


@pytest.fixture(autouse=True, scope="module")
def configured() -> Iterator[None]:
    """As it is where drafts are: rows give back more than was committed."""
    with get_context().override_server_args(speculative_algorithm="NGRAM"):
        yield


class Device:
    """States that are sums, and what SGLang's workers do to them."""

    moves = SimpleNamespace(seconds=0.0)
    host: Any = None

    def __init__(self) -> None:
        temporal = torch.zeros(1, SLOTS, 1, 1, 1)
        windows = torch.zeros(1, SLOTS, 3, 1)
        states = SimpleNamespace(temporal=temporal, conv=[windows])
        self.records = records.Records.allocated(states, SLOTS, WIDTH, is_kda=False)
        self.scratch: Any = ReplayScratch(self.records)
        self.states = temporal[0, :, 0, 0, 0]

    def run(self, commands: Sequence[Command]) -> None:
        for one in commands:
            if isinstance(one, Take):
                self.scratch.take([one])
            elif isinstance(one, Zero) and one.pool == Pool.STATE:
                self.states[one.index] = 0
            elif isinstance(one, Copy) and one.pool == Pool.STATE:
                self.states[one.destination] = self.states[one.source]

    def verify(
        self, slots: list[int], tokens: list[list[int]], accepted: list[int]
    ) -> None:
        """Record one token a draft; ``accepted`` counts the known one."""
        record = self.records.of(0).states
        record[..., 0] = record[..., 2] = 1  # key and decay
        record[: len(slots), :, 1] = torch.tensor(tokens, dtype=torch.float32)
        path = torch.arange(len(slots) * WIDTH).view(len(slots), WIDTH)
        behind = torch.arange(WIDTH) >= torch.tensor(accepted)[:, None]
        self.scratch.note_path(path.masked_fill(behind, -1), WIDTH)
        self.scratch.note_accepted(torch.tensor(slots), torch.tensor(accepted), None)


class Traffic(Bench):
    """Requests whose answers are known, on one device."""

    def __init__(self, seed: int) -> None:
        self.device = Device()
        super().__init__(pages=512, slots=SLOTS)
        self.rng = random.Random(seed)
        self.texts: dict[str, list[int]] = {}
        """Of each request, the prompt and all that could follow it."""
        self.computed: dict[str, int] = {}
        """Tokens in the state that the device has of it, drafts that it accepted among
        them."""
        self.running: list[Req] = []
        self.ended: list[tuple[int, ...]] = []
        self.missed = 0

    def make_allocator(self) -> Any:
        allocator = super().make_allocator()
        allocator.executor = self.device  # type: ignore[assignment]
        return allocator

    def slot(self, req: Req) -> int:
        return self.core.sequence(self.cache.name(req)).slot

    # ------------------------------------------------------------------ passes

    def begin(self) -> list[Req]:
        """Run a prompt: a new one, or the next turn of an old one."""
        name, rng = f"request {len(self.texts)}", self.rng
        prompt = [rng.randrange(1, 99) for _ in range(rng.randrange(5, 12))]
        if self.ended and rng.random() < 0.7:
            prompt = [*rng.choice(self.ended)[:60], *prompt[:3]]
        req = request(name, prompt)
        req.sampling_params.max_new_tokens = 64
        self.texts[name] = [*prompt, *(rng.randrange(1, 99) for _ in range(300))]
        self.queue(req)
        ran = self.step()
        if name not in ran:  # no room for it now
            self.scheduler.waiting_queue.clear()
            self.cache.front_door.forget(self.cache.name(req))
            return []
        while req.extend_end < len(prompt):  # it was paused for a snapshot
            assert self.step() == [name]
        self.running.append(req)
        self.computed[name] = len(prompt)
        return [req]

    def forward(self, batch: Batch, positions: torch.Tensor) -> None:
        """Prompts start on the state of their hit."""
        for req in batch.reqs:
            text, slot = self.texts[req.rid], self.slot(req)
            assert self.device.states[slot] == sum(text[: req.prefix_len]), req.rid
            self.device.states[slot] = sum(text[: req.extend_end])

    def verify(self) -> tuple[list[Req], list[int]]:
        """A step of all that run; what it accepts, only the device knows."""
        reqs = list(self.running)
        _, ends, _ = page_aligned_decode_alloc_lens(
            reqs, reserve=2 * WIDTH, page_size=PAGE
        )
        for req in reqs:
            req.decode_batch_idx += 1
        token_placement.verify(self.cache, self.rows, reqs, ends)
        batch: Any = SimpleNamespace(reqs=reqs, forward_mode=ForwardMode.DECODE)
        self.cache.step_begins(batch)
        accepted, tokens = [], []
        for req in reqs:
            text, start = self.texts[req.rid], self.computed[req.rid]
            assert self.device.states[self.slot(req)] == sum(text[:start]), req.rid
            right = self.rng.randrange(WIDTH)
            drafts = text[start : start + 1 + right]
            tokens.append([*drafts, *[1000] * (WIDTH - len(drafts))])
            accepted.append(1 + right)
            self.computed[req.rid] += 1 + right
        self.device.verify([self.slot(req) for req in reqs], tokens, accepted)
        self.cache.drafts.launched(batch, WIDTH)
        self.cache.step_launched(batch)
        return reqs, [count - 1 for count in accepted]

    # ----------------------------------------------------------------- results

    def handle(self, reqs: list[Req], drafts: list[int] | None) -> None:
        """What a pass gave, once SGLang knows it; some answers end there."""
        live = [req for req in reqs if req in self.running]
        batch: Any = SimpleNamespace(reqs=reqs)
        if drafts is None:
            for req in live:
                req.output_ids.append(self.texts[req.rid][len(req.origin_input_ids)])
            return
        self.cache.drafts.resolved(batch, drafts)
        for req, count in zip(reqs, drafts, strict=True):
            if req not in live:
                continue
            known = len(req.origin_input_ids) + len(req.output_ids)
            req.kv.kv_committed_len += count + 1
            req.output_ids.extend(self.texts[req.rid][known : known + count + 1])
            if self.rng.random() < 0.2:
                self.end(
                    req, cut=self.rng.choice([0, 0, self.rng.randrange(count + 1)])
                )

    def end(self, req: Req, cut: int) -> None:
        """Finish a request, so many tokens before its last one."""
        req.finished_len = len(req.output_ids) - cut
        req.finished_reason = FINISH_LENGTH(req.finished_len)
        self.release(req)

    def retract(self, req: Req) -> None:
        """Take a request's memory while a step of it is in flight."""
        req.is_retracted = True
        self.release(req)

    def release(self, req: Req) -> None:
        self.running.remove(req)
        missed = self.core.stats.turn_ends_missed
        release_kv_cache(req, self.cache, checkpoint=not req.is_retracted)
        answer = req.output_ids[: req.finished_len]
        tokens = (*req.origin_input_ids, *answer)
        self.ended.append(tokens)
        found = self.core.look_up((*tokens, 1), SGLangRequest(req).namespace())
        if self.core.stats.turn_ends_missed == missed:
            assert found.match.length >= len(tokens) - 1
        else:
            self.missed += 1

    def check_snapshots(self) -> None:
        """Every state that the tree has is that of its tokens."""
        for tokens in self.ended:
            match = self.core.look_up((*tokens, 1)).match
            if match.node is not None and match.length:
                slot = match.node.snapshot.slot
                assert self.device.states[slot] == sum(tokens[: match.length])


def run(seed: int, steps: int = STEPS) -> Traffic:
    """One server's life."""
    traffic = Traffic(seed)
    rng, overlap = traffic.rng, seed % 2 == 0
    before: tuple[list[Req], list[int] | None] | None = None
    for _ in range(steps):
        if traffic.running and rng.random() < 0.1:
            traffic.retract(rng.choice(traffic.running))
        launched: tuple[list[Req], list[int] | None]
        if not traffic.running or (len(traffic.running) < 4 and rng.random() < 0.3):
            launched = (traffic.begin(), None)
        else:
            launched = traffic.verify()
        if overlap and before is not None:
            traffic.handle(*before)
        if not overlap:
            traffic.handle(*launched)
        before = launched
    if overlap and before is not None:
        traffic.handle(*before)
    for req in list(traffic.running):
        traffic.end(req, cut=0)
    traffic.cache.run_commands(verifies=True)
    traffic.check_snapshots()
    return traffic


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 1 << 32))
def test_states_are_those_of_their_tokens(seed: int) -> None:
    run(seed)


def test_traffic_has_what_it_is_about() -> None:
    done = [run(seed) for seed in range(12)]
    assert sum(len(one.ended) for one in done) > 60
    assert any(one.missed for one in done)
    assert sum(one.core.stats.turn_ends_exact for one in done) > 50


def test_a_step_too_many_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breakage: who ends behind a step in flight keeps a draft more."""
    cut = ReplayScratch._cut

    def longer(self: Any, verified: Any, takes: Any, ended: Any) -> None:
        moved = [Take(t.pool, t.row, t.step + 1, t.destination) for t in takes]
        cut(self, verified, moved, ended)

    monkeypatch.setattr(ReplayScratch, "_cut", longer)
    with pytest.raises(AssertionError):
        for seed in range(40):
            run(seed)


def test_drafts_that_are_not_cut_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breakage: all that was accepted is folded, whoever ended."""
    monkeypatch.setattr(ReplayScratch, "_cut", lambda *_: None)
    with pytest.raises(AssertionError):
        for seed in range(40):
            run(seed)


def test_rows_of_who_was_gone_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breakage: who ended is taken for live, so that its slot is folded too late."""
    settle = ReplayScratch.settle

    def lively(self: Any, commands: Any, is_live: Any, **how: Any) -> None:
        kept = [c for c in commands if not isinstance(c, Take)]
        settle(self, kept, lambda _: True, **how)
        self._settled = {c for c in commands if isinstance(c, Take)}

    monkeypatch.setattr(ReplayScratch, "settle", lively)
    with pytest.raises((AssertionError, RuntimeError)):
        for seed in range(40):
            run(seed)
