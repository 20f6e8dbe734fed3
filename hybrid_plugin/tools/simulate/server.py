# SPDX-License-Identifier: Apache-2.0
"""An engine without a model, in virtual time.

Continuous batching as in vLLM: a pass computes one token of each sequence that decodes
and parts of prompts, together at most `chunk` tokens.  Sequences that run come first,
in the order of their admissions; then the queue is served in its order, up to the first
request that finds no room.  Where a sequence that runs finds none, the one that was
admitted last is preempted, and goes back to the head of the queue.

A pass is scheduled when the one before it starts, as engines do that overlap the two.
So what comes while a pass runs is served after the next one.  Time advances by the
costs of each pass.  Passes in which all that run only decode are taken together, up to
the next one in which something else may happen.

With drafts each pass stands alone, and is scheduled when the outcome of the one before
is known.  A sequence with `d` drafts costs what others cost that read and write as many
states while they decode, and `d` tokens of prefill.  Drafting itself costs nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from hybrid_plugin.core.policy.in_batch_sharing import LOOK_AHEAD
from hybrid_plugin.tools.simulate.attention_reach import AttentionReach
from hybrid_plugin.tools.simulate.cost_model import Costs, Work
from hybrid_plugin.tools.simulate.drafting import Drafting
from hybrid_plugin.tools.simulate.job import Job
from hybrid_plugin.tools.simulate.served_cache import ServedCache


@dataclass(slots=True)
class Server:
    """Serves jobs, pass by pass."""

    cache: ServedCache
    costs: Costs
    reach: AttentionReach = field(default_factory=AttentionReach)
    chunk: int = 8192
    """Tokens of a pass at most."""
    max_running: int = 64
    """Sequences that run at once, at most."""
    drafting: Drafting | None = None
    """Of an engine that speculates."""
    jumps: bool = True
    """Whether passes that only decode are taken together."""
    now: float = 0.0
    """When the next pass starts."""
    seen: float = 0.0
    """When that pass is scheduled: what has come by then can be part of it."""
    work: Work = field(default_factory=Work)
    """Of all passes so far."""
    started: list[Job] = field(default_factory=list)
    """In the order of their first admissions."""
    history: list[tuple[float, Work]] | None = None
    """Time and total work after each pass, where a list is given."""
    preemptions: int = 0
    peak_running: int = 0
    waiting: deque[Job] = field(default_factory=deque)
    running: list[Job] = field(default_factory=list)
    _refused: bool = False
    """Whether the head of the queue found no room, and nothing has ended since."""

    def __post_init__(self) -> None:
        self.cache.use_clock(lambda: self.now)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to serve."""
        return not self.waiting and not self.running

    def rest(self, until: float) -> None:
        """Let time pass while there is nothing to serve."""
        self.now = self.seen = max(self.now, until)

    def submit(self, job: Job) -> None:
        """Queue a job that has come by `seen`."""
        self.waiting.append(job)

    def step(self, next_arrival: float) -> list[Job]:
        """Run a pass, or several that only decode.

        Args:
            next_arrival: when the next job comes, unless one that runs ends before.

        Returns:
            The jobs that ended; their `end` is infinite if they can never be served.
        """
        if self.drafting is not None:
            self._refused = False  # slots may have been given back
            self.drafting.lend(self.running)
        preempted = self.preemptions
        scheduled, ended = self._go_on()
        if preempted == self.preemptions:
            scheduled.update(self._admit(self.chunk - sum(scheduled.values())))
        if not scheduled:
            return ended or self._drop_head()
        self.peak_running = max(self.peak_running, len(self.running))
        passes = 1
        if all(not job.is_prefilling for job in scheduled):
            passes = self._passes_alike(next_arrival, len(scheduled))
        self._compute(scheduled, passes)
        return [*ended, *self._ended()]

    # ---------------------------------------------------------------- schedule

    def _go_on(self) -> tuple[dict[Job, int], list[Job]]:
        """Tokens to compute by job, of those that run; and who ends without room."""
        scheduled: dict[Job, int] = {}
        ended: list[Job] = []
        budget = self.chunk
        for job in list(self.running):
            if job not in self.running or not budget:
                continue
            end = self._next_end(job, job.computed, budget)
            if end == job.computed:
                continue  # it waits for a pass with more room
            while not self.cache.grow(job, end):
                if self.running == [job] and end > job.computed + 1 > job.prefill_end:
                    end = job.computed + 1  # without its drafts
                    continue
                if self.running == [job]:
                    ended.append(self._end_early(job))
                    break
                last = self.running[-1]
                budget += scheduled.pop(last, 0)
                self._preempt(last)
                if last is job:
                    break
            else:
                scheduled[job] = end - job.computed
                budget -= end - job.computed
        return scheduled, ended

    def _next_end(self, job: Job, start: int, budget: int) -> int:
        if start >= job.prefill_end:
            drafts = 0 if self.drafting is None else self.drafting.drafts(job)
            return start + min(1 + drafts, budget)
        end = min(start + budget, job.prefill_end)
        return self.cache.chunk_end(job, start, end)

    def _preempt(self, job: Job) -> None:
        self.preemptions += 1
        self.running.remove(job)
        self.cache.end(job)
        job.computed, job.resumed = 0, True
        self.waiting.appendleft(job)
        self._refused = False

    def _end_early(self, job: Job) -> Job:
        """End the answer of a job that is alone and finds no room for more."""
        self.running.remove(job)
        job.end = self.now
        self.cache.end(job)
        job.forget()
        return job

    def _admit(self, budget: int) -> dict[Job, int]:
        """Tokens to compute by job, of those that are admitted now."""
        if self._refused or not self.waiting:
            return {}
        self.cache.plan(self.waiting)
        scheduled: dict[Job, int] = {}
        for job in list(islice(self.waiting, self.max_running + LOOK_AHEAD)):
            if not budget:
                break
            if len(self.running) >= self.max_running:
                job.waited = True
                break
            if self.cache.must_wait(job):
                continue
            hit = self.cache.look_up(job)
            job.prefill_end = job.num_tokens
            end = self._next_end(job, hit, budget)
            if end == hit:
                break
            if not self.cache.admit(job, hit, end):
                self._refused = job.waited = True
                break
            self._start(job, hit)
            scheduled[job] = end - hit
            budget -= end - hit
        return scheduled

    def _start(self, job: Job, hit: int) -> None:
        self.waiting.remove(job)
        self.running.append(job)
        job.computed = hit
        if job.hit is None:
            job.hit, job.admitted = hit, self.now
            self.started.append(job)

    def _drop_head(self) -> list[Job]:
        """Let go of the job that finds no room though nothing runs.

        One that ran before ends with the answer that it has.
        """
        if self.running or not self.waiting:
            return []
        self._refused = False
        job = self.waiting.popleft()
        if job.hit is not None:
            job.end = self.now
        self.cache.end(job)
        job.forget()
        return [job]

    # ----------------------------------------------------------------- compute

    def _passes_alike(self, next_arrival: float, num_scheduled: int) -> int:
        """Passes, this one included, in which all that run decode and nothing else.

        Their memory is allocated.
        """
        if (
            not self.jumps
            or self.drafting is not None
            or (self.waiting and not self._is_blocked)
        ):
            return 1
        if num_scheduled < len(self.running):
            return 1
        most = min(job.answer - job.generated for job in self.running)
        if not self._is_blocked:
            most = self._passes_until(next_arrival, most)
        size = self.cache.page_size
        wanted = sum(-(-(job.computed + most) // size) * size for job in self.running)
        held = sum(-(-(job.computed + 1) // size) * size for job in self.running)
        if wanted - held > self.cache.free_tokens():
            room = (size - job.computed % size for job in self.running)
            return min(most, *room)
        for job in self.running:
            if not self.cache.grow(job, job.computed + most):
                raise AssertionError("a cache promised room that it has not")
        return most

    @property
    def _is_blocked(self) -> bool:
        """Whether nobody can be admitted before somebody ends."""
        return bool(self.waiting) and (
            self._refused or len(self.running) >= self.max_running
        )

    def _passes_until(self, time: float, most: int) -> int:
        """Fewest passes after which `time` has come, of at most `most`."""
        low, high = 1, most
        while low < high:
            middle = (low + high) // 2
            if self.now + self.costs.seconds(self._decodes(middle)) >= time:
                high = middle
            else:
                low = middle + 1
        return low

    def _decodes(self, passes: int) -> Work:
        """Work of so many passes in which all that run decode."""
        first = sum(self.reach.read(job.computed + 1) for job in self.running)
        last = sum(self.reach.read(job.computed + passes) for job in self.running)
        return Work(
            passes=passes,
            decode_sequences=passes * len(self.running),
            kv_tokens=passes * (first + last) / 2,
        )

    def _compute(self, scheduled: dict[Job, int], passes: int) -> None:
        work = self._decodes(passes) if passes > 1 else self._pass(scheduled)
        before_last = self._decodes(passes - 1)
        prompts = sum(n for job, n in scheduled.items() if job.is_prefilling)
        drafts: dict[Job, int] = {}
        for job, tokens in scheduled.items():
            if job.is_prefilling:
                job.steps += 1
                self._refused = False  # a snapshot may be taken that it resumes from
            elif self.drafting is not None:
                drafts[job], tokens = tokens - 1, 1
            job.computed += tokens if passes == 1 else passes
        moved = self.cache.step_scheduled(list(scheduled))
        link = self.cache.link
        if link is not None:
            self.now = max(self.now, link.ready)
        self.seen = self.now + self.costs.seconds(before_last)
        accepted = {} if self.drafting is None else self.drafting.verify(drafts)
        work += Work(moves=moved)
        self.work += work
        self.now += self.costs.seconds(work)
        if link is not None:
            link.measure(prompts, self.costs.seconds(work))
        if self.history is not None:
            self.history.append((self.now, self.work))
        for job in scheduled:
            if job.is_prefilling:
                continue
            if not job.generated:
                job.first_token = self.now
            more = accepted.get(job, 0)
            job.computed += more
            job.generated = min(job.generated + passes + more, job.answer)

    def _pass(self, scheduled: dict[Job, int]) -> Work:
        tokens = drafts = pairs = sequences = read = 0.0
        for job, count in scheduled.items():
            end = job.computed + count
            if job.is_prefilling:
                tokens += count
                pairs += self.reach.pairs(job.computed, end)
            else:
                sequences += self._decodes_of(count - 1)
                drafts += count - 1
                read += self.reach.read(end)
        return Work(1, tokens > 0, tokens + drafts, pairs, sequences, read)

    def _decodes_of(self, drafts: int) -> float:
        if self.drafting is None:
            return 1.0
        return self.drafting.speculation.decodes(drafts)

    def _ended(self) -> Iterator[Job]:
        for job in list(self.running):
            if job.has_ended:
                self.running.remove(job)
                job.end = self.now
                self.cache.end(job)
                job.forget()
                self._refused = False
                yield job
