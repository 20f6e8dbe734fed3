# SPDX-License-Identifier: Apache-2.0
"""`hybrid-plugin plan`: how many sequences and cached tokens fit."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace

from hybrid_plugin.config import DEFAULT_PAGE_SIZE, ConfigError
from hybrid_plugin.sizes import gib, parse_bytes
from hybrid_plugin.tools.plan.budget import CacheBudget
from hybrid_plugin.tools.plan.estimate import (
    Estimate,
    host_memory,
    sglang_static,
    two_pools,
    vllm_aligned,
)
from hybrid_plugin.tools.plan.options import add_model_options, read_budget, read_shape
from hybrid_plugin.tools.plan.recommend import (
    add_recommendation_options,
    candidates,
    check_recommendation,
    recommend,
)
from hybrid_plugin.tools.plan.shape import ModelShape
from hybrid_plugin.tools.simulate.progress import progress
from hybrid_plugin.tools.simulate.request import TraceError

MOST_TOKENS = 1 << 30
MOST_DRAFTS = 1 << 10


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    text = "print how many sequences and cached tokens fit into a GPU's memory"
    parser = commands.add_parser("plan", help=text, description=text)
    add_model_options(parser, required=True)
    parser.add_argument(
        "--sequence-tokens",
        type=int,
        default=4096,
        metavar="N",
        help="length of a sequence (%(default)s)",
    )
    parser.add_argument(
        "--page-size",
        type=int,
        default=DEFAULT_PAGE_SIZE,
        metavar="N",
        help="tokens in a page of this package's and SGLang's pools (%(default)s)",
    )
    parser.add_argument(
        "--drafts",
        type=int,
        default=0,
        metavar="K",
        help="drafts that speculative decoding verifies at a time (%(default)s)",
    )
    parser.add_argument(
        "--host-memory",
        metavar="SIZE",
        help="host memory of each rank that keeps what the device evicts, as the "
        "option host_memory gives",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, not text")
    serving = argparse.ArgumentParser(add_help=False)
    add_recommendation_options(serving)
    add_recommendation_options(parser)
    parser.set_defaults(run=run, without_trace=serving.parse_args([]))


def run(args: argparse.Namespace) -> int:
    """Print the estimates; returns the exit status."""
    try:
        for name in ("sequence_tokens", "page_size"):
            value = getattr(args, name)
            if not 1 <= value <= MOST_TOKENS:
                raise ConfigError(
                    f"--{name.replace('_', '-')} must lie between 1 and {MOST_TOKENS}, "
                    f"got {value}."
                )
        if not 0 <= args.drafts <= MOST_DRAFTS:
            raise ConfigError(
                f"--drafts must lie between 0 and {MOST_DRAFTS}, got {args.drafts}."
            )
        check_recommendation(args, args.without_trace)
        shape = read_shape(args)
        budget = read_budget(args, shape)
        estimates = estimate_all(
            shape, budget.bytes, args.sequence_tokens, args.page_size, args.drafts
        )
        if args.host_memory is not None:
            size = parse_bytes(args.host_memory)
            estimates.append(
                host_memory(shape, size, args.sequence_tokens, args.page_size)
            )
        found = None
        if args.trace is not None:
            tried = candidates(args.page_size, args.max_running)
            with progress("Simulating settings", len(tried)) as advance:
                found = recommend(args, shape, budget.bytes, tried, advance)
    except (ConfigError, TraceError) as error:
        print(error, file=sys.stderr)
        return 2
    if args.json:
        value = _as_dict(shape, budget, estimates)
        if found is not None:
            value["recommended"] = found.as_dict()
        print(json.dumps(value, indent=2))
    else:
        print(_as_text(shape, budget, estimates, args.sequence_tokens))
        if found is not None:
            print("", *found.as_lines(), sep="\n")
    return 0


def estimate_all(
    shape: ModelShape, budget: int, length: int, page_size: int, drafts: int = 0
) -> list[Estimate]:
    """This package's pools, and the engines' schemes where they apply."""
    estimates = [two_pools(shape, budget, length, page_size, drafts)]
    there = shape.for_sglang
    if there is not shape:
        own = two_pools(there, budget, length, page_size, drafts)
        estimates.append(replace(own, scheme=f"{own.scheme}, SGLang's states"))
    if shape.attention:
        estimates.append(vllm_aligned(shape, budget, length, drafts))
        estimates.append(sglang_static(there, budget, length, page_size, drafts))
    return estimates


def _as_dict(
    shape: ModelShape, budget: CacheBudget, estimates: list[Estimate]
) -> dict[str, object]:
    return {
        "model": shape.name,
        "kv_bytes_per_token": shape.token_bytes,
        "state_bytes_per_sequence": shape.state_bytes,
        "state_bytes_per_sequence_in_sglang": shape.for_sglang.state_bytes,
        "cache_bytes": budget.bytes,
        "estimates": [asdict(estimate) for estimate in estimates],
    }


def _as_text(
    shape: ModelShape, budget: CacheBudget, estimates: list[Estimate], length: int
) -> str:
    lines = [f"{shape.name}, {shape.layers} layers"]
    for group in shape.attention:
        lines.append(
            f"  KV of a token, {group.count} layers of {group.window}: {group.formula} "
            f"= {group.token_bytes:,} bytes a layer"
        )
    for states in shape.states:
        lines.append(
            f"  states of a sequence, {states.count} layers of {states.kind}: "
            f"{states.formula} = {states.state_bytes:,} bytes a layer"
        )
    lines.append(
        f"  together {shape.token_bytes:,} bytes a token and {gib(shape.state_bytes)} "
        "a sequence"
    )
    if shape.in_sglang is not None:
        there = gib(shape.in_sglang.state_bytes)
        lines.append(
            f"  SGLang keeps states in another type: {there} a sequence; --state-dtype "
            "sets one for both engines"
        )
    lines += ["", *budget.steps]
    for estimate in estimates:
        lines += ["", estimate.scheme, *(f"  {step}" for step in estimate.steps)]
    header = f"sequences of {length} tokens"
    lines += [
        "",
        f"{header:<28}{'run':>9}{'cached':>9}{'tokens cached':>16}{'hit unit':>10}",
    ]
    for one in estimates:
        lines.append(
            f"{one.scheme:<28}{one.running:>9,}{one.cached_sequences:>9,}"
            f"{one.cached_tokens:>16,}{one.unit:>10,}"
        )
    return "\n".join(lines)
