# SPDX-License-Identifier: Apache-2.0
"""`hybrid-plugin simulate`: what a cache would have done for a request stream."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace

from hybrid_plugin.config import ConfigError
from hybrid_plugin.core.commands import Pool
from hybrid_plugin.tools.simulate.bound import PageTrace, bound_hit_tokens
from hybrid_plugin.tools.simulate.calibration import Equation, Measured
from hybrid_plugin.tools.simulate.options import (
    add_options,
    check_numbers,
    read_comparison,
    read_simulation,
)
from hybrid_plugin.tools.simulate.outcome import Outcome
from hybrid_plugin.tools.simulate.plot import check_plot, write_plot
from hybrid_plugin.tools.simulate.progress import progress
from hybrid_plugin.tools.simulate.request import Request, TraceError
from hybrid_plugin.tools.simulate.session_options import read_sample
from hybrid_plugin.tools.simulate.simulation import Simulation
from hybrid_plugin.tools.simulate.traces import format_of, read_trace, without_answers

_TEXT = "replay requests through the cache, without an engine or a GPU"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = commands.add_parser("simulate", help=_TEXT, description=_TEXT)
    add_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Replay and print; returns the exit status."""
    try:
        outcome = _simulate(args)
        if args.plot is not None:
            write_plot(outcome, args.plot)
    except (ConfigError, TraceError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Interrupted; nothing was measured.", file=sys.stderr)
        return 130
    print(json.dumps(outcome.as_dict(), indent=2) if args.json else outcome.as_text())
    return 0


def _simulate(args: argparse.Namespace) -> Outcome:
    check_numbers(args)
    if args.plot is not None:
        check_plot(args.plot)
    form = args.format or format_of(args.trace)
    requests = read_trace(
        form,
        args.trace,
        seed=args.seed,
        requests=args.requests,
        sample=read_sample(args, form),
    )
    if args.prompts_only:
        requests = without_answers(requests)
    simulation = read_simulation(args, form, requests)
    fitted: Sequence[Equation] = ()
    if args.calibrate is not None:
        measured = Measured.load(args.calibrate)
        costs, fitted = simulation.calibrated(requests, measured)
        serving = replace(simulation.serving, costs=costs)
        simulation = replace(simulation, serving=serving)
    if args.save_costs is not None:
        simulation.serving.costs.write(args.save_costs)
    comparison = read_comparison(args, simulation.serving) if args.compare else None
    with progress(f"Serving with {args.policy}", len(requests)) as advance:
        outcome = simulation.run(requests, advance)
    outcome.fitted = {one.name: (one.measured, one.simulated) for one in fitted}
    if comparison is not None:
        with progress("Serving with others", 2 * len(requests)) as advance:
            outcome.compared = comparison.run(requests, advance)
    if args.bound:
        outcome.bound_hit_tokens = _bound(simulation, outcome.order)
    return outcome


def _bound(simulation: Simulation, requests: Sequence[Request]) -> int:
    capacity = simulation.capacity
    return bound_hit_tokens(
        PageTrace.of(requests, capacity.page_size),
        pages=capacity.pages + capacity.host_rows(Pool.KV),
        slots=None
        if capacity.slots is None
        else capacity.slots + capacity.host_rows(Pool.STATE),
        first=simulation.serving.first_measured,
    )
