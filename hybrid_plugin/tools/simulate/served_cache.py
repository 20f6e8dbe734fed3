# SPDX-License-Identifier: Apache-2.0
"""What a scheduler asks of a cache, and the plugin's answers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.commands import Map, Unmap
from hybrid_plugin.engine.front_door import FrontDoor
from hybrid_plugin.tools.simulate.host_link import HostLink
from hybrid_plugin.tools.simulate.job import Job


class ServedCache(Protocol):
    """A cache behind a scheduler; `HybridCache` or a model of an engine's own."""

    def use_clock(self, clock: Callable[[], float]) -> None:
        """Take the scheduler's virtual time, in seconds, for what depends on it."""

    def plan(self, waiting: Iterable[Job]) -> None:
        """A step begins, with these jobs in the queue."""

    def must_wait(self, job: Job) -> bool:
        """Whether a job that waits should go on waiting, for another one."""

    def look_up(self, job: Job) -> int:
        """Tokens that a waiting job would restore."""

    def chunk_end(self, job: Job, start: int, end: int) -> int:
        """Where a chunk of its prefill from `start` should end, at most at `end`."""

    def admit(self, job: Job, hit: int, end: int) -> bool:
        """Give a job memory to compute up to `end`; False changes nothing."""

    def grow(self, job: Job, num_tokens: int) -> bool:
        """Give a running job memory for so many tokens; False changes nothing."""

    def free_tokens(self) -> int:
        """Tokens by which the running jobs may surely grow, all together."""

    def step_scheduled(self, jobs: Sequence[Job]) -> bool:
        """A pass was scheduled up to each job's `computed`; whether memory moved."""

    def end(self, job: Job) -> None:
        """A job has ended or is preempted."""

    @property
    def page_size(self) -> int:
        """Tokens for which memory is allocated at once."""

    @property
    def link(self) -> HostLink | None:
        """To host memory behind it; None without any."""


class PluginCache:
    """The plugin's cache, in the calls of vLLM's adapter.

    As there, a prompt is admitted if all of it fits, and no watermark is kept.
    """

    def __init__(self, cache: HybridCache, max_running: int = 64) -> None:
        """Serve from a cache, empty or warm.

        Args:
            cache: of the plugin.
            max_running: sequences that run at once, at most: as many are restored.
        """
        self.cache = cache
        self.link: HostLink | None = None
        """To the host memory behind the cache; None without any."""
        if cache.host is not None:
            assert cache.rates is not None, "a cache with a host tier has them"
            self.link = HostLink(cache.host.plan, cache.rates)
        self._max_running = max_running
        self._restoring = 0
        """Jobs of this step that wait for their prefix from host memory."""
        self._may_begin = True
        """Whether one behind them may begin to restore its own."""
        self._clock: Callable[[], float] = lambda: 0.0
        logger = logging.getLogger(__name__)
        self._front_door = FrontDoor(cache, logger, lambda: self._clock())
        self.on_step: Callable[[HybridCache], None] = lambda cache: None
        """Told of every pass, before what ends with it does."""

    def use_clock(self, clock: Callable[[], float]) -> None:
        """TTLs end by it."""
        self._clock = clock

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self.cache.page_size

    def plan(self, waiting: Iterable[Job]) -> None:
        """Decide who waits for another one's prefix."""
        self._restoring, self._may_begin = 0, True
        self._front_door.pass_time()
        if not self.cache.live:
            self.cache.lower_tiers.end_restores()
        self._front_door.plan_sharing(waiting)

    def must_wait(self, job: Job) -> bool:
        """Whether it waits for another one's prefix, or for its own from host memory.

        Nobody overtakes a job that waits for host memory; those behind it are restored
        meanwhile, as many as can run.
        """
        if self._front_door.must_wait(job.seq_id):
            return True
        if not self._restoring:
            self._restoring += self._front_door.must_wait_for_restore(job)
            return self._restoring > 0
        if self._may_begin:
            self._may_begin = self._restores_behind(job)
            self._restoring += self._may_begin
        return True

    def _restores_behind(self, job: Job) -> bool:
        """Whether a job is restored while others before it are, too."""
        if self._front_door.is_restoring(job.seq_id):
            return True
        if self.cache.live + self._restoring == self._max_running:
            return False
        return self._front_door.must_wait_for_restore(job)

    def look_up(self, job: Job) -> int:
        """Tokens up to the deepest snapshot."""
        return self._front_door.look_up(job).match.length

    def chunk_end(self, job: Job, start: int, end: int) -> int:
        """Pause for snapshots."""
        return self._front_door.chunk_end(job, start, end)

    def admit(self, job: Job, hit: int, end: int) -> bool:
        """Admit it if its whole prompt fits."""
        admission = self._front_door.admit(
            job, hit, num_tokens=end, reserve_tokens=job.num_tokens
        )
        return admission is not None

    def grow(self, job: Job, num_tokens: int) -> bool:
        """Give it pages."""
        return self.cache.grow(job.seq_id, num_tokens) is not None

    def free_tokens(self) -> int:
        """Of free and evictable pages; none with windows, whose pages come and go."""
        if self.cache.windows:
            return 0
        pages = self.cache.pages
        return (pages.free + pages.reclaimable) * self.cache.page_size

    def step_scheduled(self, jobs: Sequence[Job]) -> bool:
        """Take the commands, then note progress."""
        for job in jobs:
            self._front_door.cross(job.seq_id, job.computed)
        commands = self.cache.drain_commands()
        if self.link is not None:
            self.link.take(commands, self._clock())
        for job in jobs:
            self._front_door.advance(job.seq_id, job.computed)
        self.on_step(self.cache)
        return any(isinstance(command, Map | Unmap) for command in commands)

    def end(self, job: Job) -> None:
        """Its KV and state enter the tree."""
        self._front_door.end(job, job.computed)
