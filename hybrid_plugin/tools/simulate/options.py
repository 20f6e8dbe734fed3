# SPDX-License-Identifier: Apache-2.0
"""Command line options of `hybrid-plugin simulate`, and what they amount to."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hybrid_plugin.config import DEFAULT_PAGE_SIZE, ConfigError, HybridConfig
from hybrid_plugin.engine.cache_assembly import policy_for
from hybrid_plugin.tools.plan.options import add_model_options, read_budget, read_shape
from hybrid_plugin.tools.plan.shape import ModelShape
from hybrid_plugin.tools.simulate.capacity import Capacity
from hybrid_plugin.tools.simulate.compare import Comparison
from hybrid_plugin.tools.simulate.drafting import Speculation
from hybrid_plugin.tools.simulate.host_options import (
    add_bandwidth_option,
    read_bandwidth,
)
from hybrid_plugin.tools.simulate.mooncake import BLOCK
from hybrid_plugin.tools.simulate.plugin_options import read_plugin_options
from hybrid_plugin.tools.simulate.policies import DEFAULT_POLICY, POLICIES
from hybrid_plugin.tools.simulate.request import Request
from hybrid_plugin.tools.simulate.serving_options import (
    add_calibration_options,
    add_serving_options,
    check_counts,
    check_serving,
    read_serving,
)
from hybrid_plugin.tools.simulate.session_options import add_session_options
from hybrid_plugin.tools.simulate.simulation import Serving, Simulation
from hybrid_plugin.tools.simulate.traces import FORMATS

MOST_TOKENS = 1 << 40
MOST_DRAFTS = 1 << 10
_LIMITS = {
    "kv_tokens": MOST_TOKENS,
    "state_slots": 1 << 28,
    "page_size": 1 << 20,
    "requests": 1 << 24,
    "drafts": MOST_DRAFTS,
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add everything but the model's options to `parser`, and then those."""
    parser.add_argument(
        "trace",
        nargs="?",
        type=Path,
        metavar="TRACE",
        help="requests as JSON Lines, or recorded conversations: one as JSON, or a "
        "folder of them; without it an agentic stream is made",
    )
    parser.add_argument(
        "--format", choices=FORMATS, help="by default what the first line looks like"
    )
    parser.add_argument(
        "--policy",
        choices=POLICIES,
        default=DEFAULT_POLICY,
        help="what is evicted first (%(default)s)",
    )
    parser.add_argument(
        "--measure",
        choices=("all", "last-half"),
        default="all",
        help="requests that count (%(default)s); the others warm the cache up",
    )
    parser.add_argument(
        "--bound",
        action="store_true",
        help="compute what no policy can exceed, and the gap to it",
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="serve the same requests in the same memory with models of vLLM's and "
        "SGLang's own caches too; models, written from what these do by default",
    )
    _add_memory(parser)
    _add_stream(parser)
    _add_speculation(parser)
    add_serving_options(parser)
    add_calibration_options(parser)
    add_session_options(parser)
    _add_output(parser)
    add_model_options(parser, required=False)


def _add_memory(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "cache", "without --kv-tokens or --gpu-memory there is room for everything"
    )
    group.add_argument(
        "--kv-tokens", type=int, metavar="N", help="room for KV, in tokens"
    )
    group.add_argument(
        "--state-slots",
        type=int,
        metavar="N",
        help="room for states, in sequences, beside --kv-tokens",
    )
    group.add_argument(
        "--kv-only", action="store_true", help="as if the model had no state layers"
    )
    group.add_argument(
        "--elastic",
        action=argparse.BooleanOptionalAction,
        help="whether memory moves between KV and states, with --gpu-memory; by "
        "default wherever an engine would let it",
    )
    group.add_argument(
        "--page-size",
        type=int,
        metavar="N",
        help=f"tokens in a page; by default {DEFAULT_PAGE_SIZE}, or the {BLOCK} of a "
        "block of a Mooncake trace with --kv-only",
    )
    group.add_argument(
        "--host-memory",
        metavar="SIZE",
        help="host memory that keeps what the device evicts, with --gpu-memory, as the "
        "option host_memory gives",
    )
    add_bandwidth_option(group)
    group.add_argument(
        "--hybrid-config",
        metavar="JSON",
        help="options as an engine takes them, such as '{\"page_size\": 32}'",
    )


def _add_stream(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("requests")
    group.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of the agentic stream, or of the sample of conversations (%(default)s)",
    )
    group.add_argument(
        "--requests",
        type=int,
        default=2000,
        metavar="N",
        help="of the agentic stream (%(default)s)",
    )
    group.add_argument(
        "--prompts-only",
        action="store_true",
        help="as if every request ended with the first token of its answer",
    )


def _add_speculation(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("speculative decoding")
    group.add_argument(
        "--drafts",
        type=int,
        metavar="K",
        help="tokens that are drafted and verified at a time",
    )
    group.add_argument(
        "--draft-states",
        choices=("slots", "scratch"),
        default="slots",
        help="where states after drafts lie: in slots that are lent for them, or in a "
        "scratch beside the pools as in SGLang, with room for all of --max-running; it "
        "takes a part of --gpu-memory (%(default)s)",
    )
    group.add_argument(
        "--acceptance",
        type=float,
        metavar="L",
        help="tokens that a verification of K drafts gives on average, the one after "
        "them included",
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, not text")
    parser.add_argument(
        "--plot", type=Path, metavar="PNG", help="draw hit rate and memory over time"
    )


def check_numbers(args: argparse.Namespace) -> None:
    """Refuse numbers that make no sense.

    Raises:
        ConfigError: for the first of them.
    """
    check_counts(args, _LIMITS)
    check_serving(args)
    if args.seed < 0:
        raise ConfigError(f"--seed must not be negative, got {args.seed}.")
    if args.kv_tokens is not None and args.gpu_memory is not None:
        raise ConfigError(
            "--kv-tokens and --gpu-memory both say how much memory there is: give one."
        )
    if args.compare and (args.gpu_memory is None or args.kv_only):
        raise ConfigError(
            "--compare needs --gpu-memory and --model-config, to know what the others "
            "make of the memory, and a model with states."
        )
    if (args.drafts is None) != (args.acceptance is None):
        raise ConfigError(
            "--drafts and --acceptance go together: how many are drafted, and how many "
            "tokens a verification of them gives."
        )
    scratch = args.draft_states == "scratch"
    if scratch and (args.drafts is None or args.gpu_memory is None):
        raise ConfigError(
            "--draft-states scratch needs --drafts, and --gpu-memory, which the "
            "scratch takes a part of."
        )
    if args.compare and args.drafts is not None:
        raise ConfigError(
            "--compare models the engines' caches without drafts: leave --drafts out."
        )
    if args.gpu_memory is not None and args.model_config is None:
        raise ConfigError("--gpu-memory needs --model-config, to know what fits.")
    if args.state_slots is not None and (args.kv_only or args.kv_tokens is None):
        raise ConfigError(
            "--state-slots goes with --kv-tokens, and not with --kv-only."
        )
    if args.kv_tokens is not None and not args.kv_only and args.state_slots is None:
        raise ConfigError(
            "--kv-tokens is room for KV alone: say --kv-only for a model without "
            "states, or --state-slots for how many of them there is room."
        )


def read_simulation(
    args: argparse.Namespace, form: str, requests: Sequence[Request]
) -> Simulation:
    """The simulation that is meant.

    Args:
        args: parsed, and checked by `check_numbers`.
        form: of the trace.
        requests: to be replayed.

    Raises:
        ConfigError: if the options make no sense.
    """
    shape = None if args.model_config is None else read_shape(args)
    options = read_plugin_options(args, shape)
    page_size = options.page_size
    if page_size is None:
        blocks = form == "mooncake" and args.kv_only
        page_size = BLOCK if blocks else DEFAULT_PAGE_SIZE
    serving = read_serving(args, shape, requests)
    if args.measure == "last-half":
        serving = replace(serving, first_measured=len(requests) // 2)
    return Simulation(
        capacity=_capacity(args, options, shape, page_size, requests, serving),
        snapshots=policy_for(
            options,
            page_size,
            has_states=shape is None or bool(shape.layout(page_size).states),
            keeps_states_inside=options.wanted_kernels == "ours",
        ),
        policy=args.policy,
        serving=serving,
        speculation=_speculation(args),
        host_bandwidth=read_bandwidth(args, options.host_memory),
    )


def _speculation(args: argparse.Namespace) -> Speculation | None:
    if args.drafts is None:
        return None
    scratch = args.draft_states == "scratch"
    return Speculation(args.drafts, args.acceptance, scratch)


def read_comparison(args: argparse.Namespace, serving: Serving) -> Comparison:
    """The engines' own caches in the same memory.

    Args:
        args: parsed, and checked by `check_numbers`.
        serving: of the same requests.

    Raises:
        ConfigError: for a model whose caches have no model here.
    """
    shape = read_shape(args)
    options = read_plugin_options(args, shape)
    budget = read_budget(args, shape).bytes
    return Comparison(shape, min(budget, options.gpu_memory_budget or budget), serving)


def _capacity(
    args: argparse.Namespace,
    options: HybridConfig,
    shape: ModelShape | None,
    page_size: int,
    requests: Sequence[Request],
    serving: Serving,
) -> Capacity:
    if args.gpu_memory is not None:
        assert shape is not None, "checked with the other options"
        layout = shape.layout(page_size)
        if args.kv_only:
            layout = replace(layout, states=())
        budget = read_budget(args, shape).bytes
        speculation = _speculation(args)
        if speculation is not None:
            budget -= speculation.scratch_bytes(args.max_running, layout.slot_bytes)
        return Capacity.of_layout(
            layout,
            budget,
            requests,
            serving.chunk,
            options=options,
            concurrency=serving.most_running,
        )
    if args.kv_tokens is not None:
        return Capacity(page_size, args.kv_tokens // page_size, args.state_slots)
    return Capacity.unbounded(requests, page_size, states=not args.kv_only)
