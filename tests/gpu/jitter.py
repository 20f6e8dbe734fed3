# SPDX-License-Identifier: Apache-2.0
"""Runs SGLang's own test of caches under random delays, with the plugin.

    python -m tests.gpu.jitter --options '{"deterministic": "prefix"}'

SGLang's `cache_consistency_jitter` delays the device at random behind every event of a
CUDA stream, keeps the pool short of memory, asks the same prompts many times at once,
and requires the same bits of every token's log probabilities.  As SGLang runs it,
requests go on from the middle of earlier answers, and are retracted while they decode:
so prefill has to give the bits of decode.  `deterministic: prefix` does not promise
that; `--turns` tries it.  Without `--turns` every request repeats a whole prompt, and
none is retracted.

On a CPU there are no streams to delay, and bits may depend on the batch: the run shows
that the test starts, evicts and ends.  Ends with status 0 if all bits are equal.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from tests.gpu.determinism.engine import ON_GPU, Setup
from tests.gpu.deterministic import model_folder

SHORTEST_ANSWER = 64
"""Tokens that SGLang's test has each request generate at least: if answers have just so
many, all requests begin where the prompt ends."""
TURN_ANSWER = 512
LONGEST_PROMPT = 3500
"""With an answer behind it as long as models of `slow_decay` take."""
NEVER = 10**9
"""Steps between two retractions."""


def setup_of(args: argparse.Namespace) -> Setup:
    """The engine's configuration but for what the test needs."""
    flags = {"enable_deterministic_inference": True} if ON_GPU else {}
    return Setup(
        "sglang",
        model_folder(args.model),
        args.dtype,
        args.chunk,
        None if args.stock else {"enabled": True, **args.options},
        flags | args.flags,
    )


def arguments(setup: Setup, args: argparse.Namespace) -> dict[str, Any]:
    """Of SGLang's engine with delays."""
    longest = args.prompt + _answer(args)
    return setup.arguments() | {
        "context_length": longest,
        # Short of memory: a third of the prompts fit.
        "max_total_tokens": longest * max(args.prompts // 3, 2),
        "jitter_probability": args.probability if ON_GPU else 0.0,
        "retract_interval": args.retract_interval if args.turns else NEVER,
    }


def _answer(args: argparse.Namespace) -> int:
    """Tokens of an answer to a whole prompt."""
    return TURN_ANSWER if args.turns else SHORTEST_ANSWER


def run(args: argparse.Namespace) -> int:
    """Run the test; 0 if it passes."""
    setup = setup_of(args)
    setup.set_environment()
    from sglang.test.cache_consistency_jitter import get_jitter_engine, run_jitter_test

    with get_jitter_engine(**arguments(setup, args)) as engine:
        try:
            run_jitter_test(
                engine,
                num_unique_prefixes=args.prompts,
                requests_per_prefix=args.repeats,
                prefix_len_min=args.prompt // 2,
                prefix_len_max=args.prompt,
                new_tokens=_answer(args),
                vocab_size=setup.vocabulary,
                min_retracted_requests=10 if args.turns else 0,
            )
        except AssertionError as failure:
            print(f"SGLang's test fails: {failure}")
            return 1
    print("SGLang's test passes.")
    return 0


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="bundled", help="as of deterministic")
    parser.add_argument("--dtype", default="bfloat16", help="(%(default)s)")
    parser.add_argument("--options", type=json.loads, default={}, help="JSON")
    parser.add_argument("--flags", type=json.loads, default={}, help="JSON")
    parser.add_argument("--stock", action="store_true", help="without the plugin")
    parser.add_argument("--turns", action="store_true", help="as SGLang runs it")
    for name, default, meaning in (
        ("prompts", 10, "that are asked"),
        ("repeats", 10, "of each"),
        ("prompt", LONGEST_PROMPT, "tokens of the longest"),
        ("chunk", 512, "tokens of a pass at most"),
        ("retract-interval", 500, "steps, with --turns"),
    ):
        parser.add_argument(
            f"--{name}", type=int, default=default, help=f"{meaning} (%(default)s)"
        )
    parser.add_argument(
        "--probability", type=float, default=0.1, help="of a delay (%(default)s)"
    )
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(run(parse()))
