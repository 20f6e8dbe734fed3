# SPDX-License-Identifier: Apache-2.0
"""Which settings serve a trace best: all are simulated, beside models of stock."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path

from hybrid_plugin.config import ConfigError, HybridConfig
from hybrid_plugin.engine.cache_assembly import policy_for
from hybrid_plugin.sizes import parse_bytes
from hybrid_plugin.tools.plan.shape import ModelShape
from hybrid_plugin.tools.simulate.capacity import Capacity
from hybrid_plugin.tools.simulate.compare import Comparison
from hybrid_plugin.tools.simulate.compared import Compared, as_lines
from hybrid_plugin.tools.simulate.host_options import (
    add_bandwidth_option,
    read_bandwidth,
)
from hybrid_plugin.tools.simulate.request import Request
from hybrid_plugin.tools.simulate.serving_options import (
    add_serving_options,
    check_serving,
    read_serving,
)
from hybrid_plugin.tools.simulate.session_options import (
    add_session_options,
    read_sample,
)
from hybrid_plugin.tools.simulate.simulation import Serving, Simulation
from hybrid_plugin.tools.simulate.traces import FORMATS, format_of, read_trace

PAGE_SIZES = (16, 64)
"""The default, and one that more attention backends take."""
RATIOS = (0.1, 0.3)
"""Of `state_memory_ratio`, beside elastic pools: for long prompts, and for shorter."""
FEWER = 4
"""Part of the sequences that run at once, tried beside all of them."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a user chooses."""

    page_size: int
    state_memory_ratio: float | None
    """None for elastic pools."""
    max_running: int

    @property
    def title(self) -> str:
        """For people."""
        ratio = self.state_memory_ratio
        pools = "elastic" if ratio is None else f"ratio {ratio:g}"
        return f"{pools}, page {self.page_size}, {self.max_running} run"


@dataclass(frozen=True, slots=True)
class Recommendation:
    """All settings, the best first, and stock's."""

    settings: Sequence[tuple[Settings, Compared]]
    refused: Sequence[tuple[Settings, str]]
    """Settings that do not fit, and why."""
    stock: Sequence[Compared]
    costs: str
    by_goodput: bool
    host_memory: int | None = None
    """Bytes that all settings had behind the device's; None for none."""

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "settings": [asdict(s) | asdict(found) for s, found in self.settings],
            "refused": [asdict(s) | {"why": why} for s, why in self.refused],
            "stock": [asdict(one) for one in self.stock],
            "costs": self.costs,
            "host_memory": self.host_memory,
        }

    def as_lines(self) -> list[str]:
        """For people."""
        best = self.settings[0][0]
        options = [f'"page_size": {best.page_size}']
        if self.host_memory is not None:
            options.append(f'"host_memory": {self.host_memory}')
        if best.state_memory_ratio is not None:
            options.append(f'"state_memory_ratio": {best.state_memory_ratio:g}')
        measure = "goodput" if self.by_goodput else "p95 of the time to the first token"
        lines = as_lines([*(found for _, found in self.settings), *self.stock])
        lines += [f"{s.title}: {why}" for s, why in self.refused]
        lines += [
            f"costs: {self.costs}",
            f"best by {measure}: HYBRID_CONFIG='{{{', '.join(options)}}}', at most "
            f"{best.max_running} sequences at once",
        ]
        return lines


def add_recommendation_options(parser: argparse.ArgumentParser) -> None:
    """Add what says which trace is served, and how."""
    group = parser.add_argument_group("trace", "settings are simulated with --trace")
    group.add_argument(
        "--trace", type=Path, metavar="TRACE", help="as `hybrid-plugin simulate` reads"
    )
    group.add_argument("--format", choices=FORMATS, help="of the trace")
    group.add_argument(
        "--seed", type=int, default=0, help="of arrivals and samples (%(default)s)"
    )
    add_bandwidth_option(group)
    add_serving_options(parser)
    add_session_options(parser)


def check_recommendation(args: argparse.Namespace, default: argparse.Namespace) -> None:
    """Refuse numbers that make no sense, and a trace's options without a trace.

    Raises:
        ConfigError: for the first of them.
    """
    if args.trace is None:
        for name, value in vars(default).items():
            if getattr(args, name) != value:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag} says how a trace is served: give --trace.")
        return
    check_serving(args)
    if args.seed < 0:
        raise ConfigError(f"--seed must not be negative, got {args.seed}.")


def recommend(
    args: argparse.Namespace,
    shape: ModelShape,
    budget: int,
    tried: Sequence[Settings],
    on_run: Callable[[], None] = lambda: None,
) -> Recommendation:
    """Simulate settings on the trace.

    Args:
        args: parsed, with a trace, and checked.
        shape: of the model.
        budget: bytes of the cache.
        tried: the settings.
        on_run: called after each simulation.

    Raises:
        ConfigError: if no setting fits, for host memory without its bandwidth, or for
            a model whose caches have no model here.
        TraceError: for a trace that cannot be read.
    """
    form = args.format or format_of(args.trace)
    sample = read_sample(args, form)
    requests = read_trace(form, args.trace, seed=args.seed, requests=0, sample=sample)
    serving = read_serving(args, shape, requests)
    host = None if args.host_memory is None else parse_bytes(args.host_memory)
    bandwidth = read_bandwidth(args, host)
    stock = Comparison(shape, budget, serving)
    found, refused = [], []
    for settings in tried:
        try:
            simulation = _simulation(settings, shape, budget, requests, serving, host)
            simulation = replace(simulation, host_bandwidth=bandwidth)
            found.append((settings, _serve(settings, simulation, requests)))
        except ConfigError as error:
            refused.append((settings, str(error)))
        on_run()
    if not found:
        raise ConfigError(refused[0][1])
    targets = serving.targets
    by_goodput = min(targets.ttft, targets.tpot) < inf
    found.sort(key=lambda one: _rank(one[1], by_goodput=by_goodput))
    return Recommendation(
        found,
        refused,
        stock.run(requests),
        serving.costs.title,
        by_goodput,
        host,
    )


def candidates(page_size: int, max_running: int) -> list[Settings]:
    """Each differs from the first one in one choice."""
    first = Settings(page_size, None, max_running)
    others = [replace(first, page_size=size) for size in PAGE_SIZES]
    others += [replace(first, state_memory_ratio=ratio) for ratio in RATIOS]
    others.append(replace(first, max_running=max(max_running // FEWER, 1)))
    return list(dict.fromkeys([first, *others]))


def _simulation(
    settings: Settings,
    shape: ModelShape,
    budget: int,
    requests: Sequence[Request],
    serving: Serving,
    host_memory: int | None,
) -> Simulation:
    ratio = settings.state_memory_ratio
    options = HybridConfig(
        page_size=settings.page_size,
        elastic=None if ratio is None else False,
        state_memory_ratio=ratio,
        host_memory=host_memory,
    )
    serving = replace(serving, max_running=settings.max_running)
    layout = shape.layout(settings.page_size)
    capacity = Capacity.of_layout(
        layout,
        budget,
        requests,
        serving.chunk,
        options=options,
        concurrency=serving.most_running,
    )
    rules = policy_for(
        options,
        settings.page_size,
        has_states=bool(layout.states),
        keeps_states_inside=options.wanted_kernels == "ours",
    )
    return Simulation(capacity, rules, serving=serving)


def _serve(
    settings: Settings, simulation: Simulation, requests: Sequence[Request]
) -> Compared:
    outcome = simulation.run(requests)
    return Compared(
        settings.title,
        outcome.hit_rate,
        outcome.too_long,
        outcome.preemptions,
        outcome.times,
    )


def _rank(found: Compared, *, by_goodput: bool) -> tuple[float, float]:
    """Less is better; what refuses fewer requests comes first."""
    if found.times is None:
        return found.too_long, inf
    value = -found.times.goodput if by_goodput else found.times.ttft["p95"]
    return found.too_long, value
