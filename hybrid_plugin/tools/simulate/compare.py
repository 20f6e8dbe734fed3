# SPDX-License-Identifier: Apache-2.0
"""Models of the engines' own caches on the requests and the memory of a simulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from hybrid_plugin.config import ConfigError
from hybrid_plugin.core.memory.attention_windows import FULL_ATTENTION
from hybrid_plugin.tools.plan.estimate import aligned_blocks, static_pools
from hybrid_plugin.tools.plan.shape import ModelShape
from hybrid_plugin.tools.simulate.compared import Compared
from hybrid_plugin.tools.simulate.latency import Times
from hybrid_plugin.tools.simulate.request import Request
from hybrid_plugin.tools.simulate.served_cache import ServedCache
from hybrid_plugin.tools.simulate.serving import serve
from hybrid_plugin.tools.simulate.simulation import Serving
from hybrid_plugin.tools.simulate.stock_sglang import SglangModel
from hybrid_plugin.tools.simulate.stock_vllm import VllmModel


@dataclass(frozen=True, slots=True)
class Comparison:
    """Serves requests with models of the engines' own caches."""

    shape: ModelShape
    budget: int
    """Bytes."""
    serving: Serving

    def __post_init__(self) -> None:
        windows = [g for g in self.shape.attention if g.window != FULL_ATTENTION]
        if windows or not self.shape.attention or not self.shape.states:
            raise ConfigError(
                "--compare models the engines' caches for layers with full attention "
                "and layers with states, and nothing else: leave it out for this model."
            )

    def run(
        self,
        requests: Sequence[Request],
        on_request: Callable[[], None] = lambda: None,
    ) -> list[Compared]:
        """Serve `requests` with each; calls `on_request` after each request."""
        models: dict[str, Callable[[], ServedCache]] = {
            "vLLM's, model": partial(
                VllmModel, aligned_blocks(self.shape, self.budget)
            ),
            "SGLang's, model": partial(
                SglangModel,
                static_pools(self.shape.for_sglang, self.budget, 1),
            ),
        }
        return [
            self._serve(name, build(), requests, on_request)
            for name, build in models.items()
        ]

    def _serve(
        self,
        name: str,
        cache: ServedCache,
        requests: Sequence[Request],
        on_request: Callable[[], None],
    ) -> Compared:
        server, too_long = self.serving.server(cache), 0
        for job in serve(server, requests, self.serving.pace):
            too_long += job.hit is None
            on_request()
        jobs = self.serving.measured(server)
        queried = sum(job.length for job in jobs)
        hits = sum(job.hit or 0 for job in jobs)
        return Compared(
            name,
            hits / queried if queried else 0.0,
            too_long,
            server.preemptions,
            Times.of(jobs, server, self.serving.targets),
        )
