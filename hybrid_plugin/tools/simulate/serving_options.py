# SPDX-License-Identifier: Apache-2.0
"""Command line options for how requests come and what their service costs."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from hybrid_plugin.config import ConfigError
from hybrid_plugin.tools.plan.shape import ModelShape
from hybrid_plugin.tools.simulate.arrivals import Pace
from hybrid_plugin.tools.simulate.attention_reach import AttentionReach
from hybrid_plugin.tools.simulate.cost_model import CostModel
from hybrid_plugin.tools.simulate.known_costs import DEFAULT_COSTS, estimate
from hybrid_plugin.tools.simulate.latency import Targets
from hybrid_plugin.tools.simulate.request import Request
from hybrid_plugin.tools.simulate.simulation import Serving

_COUNTS = {"concurrency": 1 << 20, "max_running": 1 << 20, "chunk": 1 << 30}
_NUMBERS = ("rate", "slo_ttft", "slo_tpot", "device_tflops", "device_bandwidth")


def add_serving_options(parser: argparse.ArgumentParser) -> None:
    """Add what `read_serving` reads to `parser`."""
    group = parser.add_argument_group("virtual time")
    group.add_argument(
        "--rate",
        type=float,
        metavar="R",
        help="requests, or conversations that begin, per second, as a Poisson process; "
        "by default they come at the trace's times",
    )
    group.add_argument(
        "--concurrency",
        type=int,
        metavar="N",
        help="requests in flight, at most: so many clients wait for their answers; by "
        "default 1 for a trace without times, and any number otherwise",
    )
    group.add_argument(
        "--max-running",
        type=int,
        default=64,
        metavar="N",
        help="sequences that the engine runs at once, at most (%(default)s)",
    )
    group.add_argument(
        "--chunk",
        type=int,
        default=8192,
        metavar="N",
        help="tokens of a forward pass, at most (%(default)s)",
    )
    group.add_argument(
        "--cost-model",
        type=Path,
        metavar="FILE",
        help="what a forward pass costs, as JSON; by default costs of "
        f"{DEFAULT_COSTS.model} on {DEFAULT_COSTS.machine}",
    )
    group.add_argument(
        "--device-tflops",
        type=float,
        metavar="X",
        help="estimate the costs of --model-config, with --device-bandwidth, for a "
        "device of X * 10^12 operations per second; without an engine's overhead",
    )
    group.add_argument(
        "--device-bandwidth",
        type=float,
        metavar="X",
        help="and of X * 10^12 bytes of memory per second",
    )
    group.add_argument(
        "--slo-ttft",
        type=float,
        metavar="SECONDS",
        help="a good request has its first token by then",
    )
    group.add_argument(
        "--slo-tpot",
        type=float,
        metavar="SECONDS",
        help="a good request takes at most so long for each later token",
    )


def add_calibration_options(parser: argparse.ArgumentParser) -> None:
    """Add what fits costs to a measured run, and keeps them."""
    group = parser.add_argument_group("calibration")
    group.add_argument(
        "--calibrate",
        type=Path,
        metavar="MEASURED",
        help="fit the costs to a measured run of this trace with these options, a JSON "
        "file of machine, model and some of wall_s, ttft_s and tpot_s",
    )
    group.add_argument(
        "--save-costs",
        type=Path,
        metavar="FILE",
        help="write the costs that were used, for --cost-model",
    )


def check_counts(args: argparse.Namespace, limits: Mapping[str, int]) -> None:
    """Refuse counts that are out of range.

    Args:
        args: parsed.
        limits: the highest value of each option, by its name in `args`; the lowest
            is 1.

    Raises:
        ConfigError: for the first of them.
    """
    for name, most in limits.items():
        value = getattr(args, name)
        if value is not None and not 1 <= value <= most:
            raise ConfigError(
                f"--{name.replace('_', '-')} must lie between 1 and {most}, "
                f"got {value}."
            )


def check_serving(args: argparse.Namespace) -> None:
    """Refuse numbers that make no sense.

    Raises:
        ConfigError: for the first of them.
    """
    check_counts(args, _COUNTS)
    for name in _NUMBERS:
        value = getattr(args, name)
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ConfigError(
                f"--{name.replace('_', '-')} must be more than 0, got {value:g}."
            )
    device = (args.device_tflops, args.device_bandwidth)
    if device != (None, None):
        if None in device or args.model_config is None:
            raise ConfigError(
                "--device-tflops, --device-bandwidth and --model-config go together: "
                "costs are estimated from all three."
            )
        if args.cost_model is not None:
            raise ConfigError(
                "--cost-model says what a pass costs: leave --device-tflops and "
                "--device-bandwidth out."
            )


def read_serving(
    args: argparse.Namespace, shape: ModelShape | None, requests: Sequence[Request]
) -> Serving:
    """How requests are served, but for the cache.

    Args:
        args: parsed, and checked by `check_serving`.
        shape: of the model, if one is given.
        requests: to be served.

    Raises:
        ConfigError: for a cost model that cannot be read.
    """
    has_times = args.rate is not None or any(r.arrival is not None for r in requests)
    concurrency = args.concurrency or (None if has_times else 1)
    return Serving(
        pace=Pace(concurrency, args.rate, args.seed),
        costs=_costs(args, shape),
        reach=AttentionReach() if shape is None else AttentionReach.of(shape),
        chunk=args.chunk,
        max_running=args.max_running,
        targets=Targets(args.slo_ttft or math.inf, args.slo_tpot or math.inf),
    )


def _costs(args: argparse.Namespace, shape: ModelShape | None) -> CostModel:
    if args.cost_model is not None:
        return CostModel.load(args.cost_model)
    if args.device_tflops is not None:
        assert shape is not None, "checked with the other options"
        return estimate(shape, args.device_tflops * 1e12, args.device_bandwidth * 1e12)
    return DEFAULT_COSTS
