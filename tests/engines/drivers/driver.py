# SPDX-License-Identifier: Apache-2.0
"""The interface between the tests of behaviour and an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from signal import Signals
from typing import Any, Protocol

import httpx

from hybrid_plugin.engine import untried
from tests.engines.messages import Answer, Ask, Launch

MODEL = Path(__file__).parents[2] / "assets" / "tiny-qwen3-next"
MAX_MODEL_LEN = 1024


@dataclass(frozen=True)
class Setup:
    """What tests ask of a server; the rest is the driver's."""

    model: Path = MODEL
    dtype: str = "bfloat16"
    plugin: bool = True
    prefix_cache: bool = True
    """Whether anything is cached across requests."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the plugin."""
    pools: tuple[int, int] | None = None
    """Exactly so many pages and slots, the reserved ones counted, and fixed."""
    max_running: int = 16
    flags: Sequence[str] = ()
    """In the engine's own words: from its driver only."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """The same."""
    fault: str | None = None
    """See `faults`."""
    cold: bool = False
    """Whether to start it as users do, engine imports and all; see `warm_start`."""


@dataclass(frozen=True)
class Model:
    """A checkpoint of a kind, and how near to the reference answers must come."""

    kind: str
    """"bundled", or a function of `slow_decay` without its `write_`."""
    dtype: str
    bound: float
    """Nats that the reference may lose at a first difference; 0 for equal."""
    stray: int = 0
    """Answers beyond the bound that are let pass: as many as the engine alone gives."""
    quick: tuple[str, ...] | None = None
    """Variants that it is tested with unless HYBRID_TEST_ALL is set; None for all."""
    unserved: tuple[str, ...] = ()
    """Variants that the engine does not serve it in."""

    def checkpoint(self, folder: Path) -> Path:
        """The bundled model, or one that is written to the folder."""
        if self.kind == "bundled":
            return MODEL
        from tests.engines import slow_decay  # takes torch, which few tests need

        return Path(getattr(slow_decay, f"write_{self.kind}")(folder))


@dataclass(frozen=True)
class Variant:
    """One way to run the plugin."""

    options: Mapping[str, Any]
    least_reuse: float
    """Share of prompt tokens that must come from the cache."""
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    pools: tuple[int, int] | None = None
    """As in `Setup`."""
    fault: str | None = None
    """The same."""
    preempts: bool = False
    """Whether sequences must be preempted."""
    says: str = ""
    """What the server's log must say."""


@dataclass(frozen=True)
class Stages:
    """How an engine is tested in two stages of a pipeline."""

    flags: tuple[str, ...]
    """Of every server, the engine alone too."""
    models: Mapping[str, Model]
    """`quick` names those of the variants that each is tested with, always."""
    variants: Mapping[str, Variant]
    elastic_budget: int
    """Bytes that are too few for both pools of a stage of the first model at once."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """The same as `flags`."""

    def setup(self, **more: Any) -> dict[str, Any]:
        """Fields of `Setup` for a server in stages.

        Args:
            more: other fields; flags and variables come behind those of stages.
        """
        more["flags"] = (*self.flags, *more.get("flags", ()))
        tried = {untried.TRIED: untried.STAGES}
        given = more.get("environment", {})
        more["environment"] = {**tried, **self.environment, **given}
        return more


@dataclass(frozen=True)
class Refusal:
    """A server that must not start, and what it says."""

    sentence: str
    options: Mapping[str, Any] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    fault: str | None = None


@dataclass(frozen=True)
class Decision:
    """What an engine makes of its configuration, before it loads a model."""

    active: bool = False
    refusal: str | None = None
    """Why it would not start."""
    lines: tuple[str, ...] = ()
    """What the plugin logged."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """The engine's own, as far as they concern caching and scheduling."""


class Driver(Protocol):
    """An engine's server, as the tests see it."""

    @property
    def name(self) -> str:
        """Of the engine."""

    @property
    def last_signal(self) -> Signals:
        """What ends a server's processes without a delay."""

    @property
    def page_size(self) -> int:
        """Tokens in a page: the least that the engine takes here by default."""

    @property
    def elastic_budget(self) -> int:
        """Bytes that are too few for both pools of the bundled model at once."""

    @property
    def offloading(self) -> tuple[str, ...]:
        """The engine's own flags for KV in host memory: for more than these bytes."""

    @property
    def models(self) -> Mapping[str, Model]:
        """What equality is tested with."""

    @property
    def variants(self) -> Mapping[str, Variant]:
        """Ways to run the plugin that equality is tested with."""

    @property
    def stages(self) -> Stages:
        """How pipeline parallelism is tested, on GPUs above all."""

    @property
    def refusals(self) -> Mapping[str, Refusal]:
        """Servers that must not start."""

    @property
    def conflicts(self) -> Mapping[str, tuple[tuple[str, ...], str]]:
        """Flags that the plugin cannot serve, and the sentence about each."""

    def decide(self, setup: Setup, *, demanded: bool = False) -> Decision:
        """Configure an engine in this process.

        Args:
            setup: of the server it would be; `fault` does not count.
            demanded: whether the plugin must serve it or refuse.
        """

    def launch(self, setup: Setup, port: int) -> Launch:
        """The command line of a server."""

    async def stream(self, client: httpx.AsyncClient, ask: Ask) -> Answer:
        """Send one request, streamed, to the client's base URL."""

    def cached_with_prompt_logprobs(self, url: str, prompt: Sequence[int]) -> int:
        """Tokens restored for a request that wants logprobs of its prompt."""

    def pause(self, url: str) -> None:
        """Have the server take requests in, and compute nothing."""

    def resume(self, url: str) -> None:
        """Have it compute again."""

    def forget(self, url: str) -> None:
        """Have the server forget everything cached."""

    def update_weights(self, url: str, model: Path) -> None:
        """Have the server load a checkpoint's weights in place, and forget the rest."""

    def sleep(self, url: str) -> None:
        """Have the server give the memory of its cache back."""

    def wake_up(self, url: str) -> None:
        """Have it take that memory again, and serve."""

    def metrics(self, url: str) -> str:
        """The text of /metrics, no older than the last answer."""

    def kv_events(self, endpoint: str) -> tuple[str, ...]:
        """Flags that have a server publish KV cache events at a ZMQ endpoint."""

    def publish(self, url: str) -> None:
        """Have the server's publisher get the events of all that was answered."""

    def kv_event_batch(self) -> type[Any]:
        """The engine's type of what a message of its publisher encodes."""
