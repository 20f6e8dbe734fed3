# SPDX-License-Identifier: Apache-2.0
"""Small traces, and caches for them."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybrid_plugin.config import HybridConfig
from hybrid_plugin.core.tree.tokens import Tokens
from hybrid_plugin.tools.simulate.arrivals import Pace
from hybrid_plugin.tools.simulate.capacity import Capacity
from hybrid_plugin.tools.simulate.outcome import Outcome
from hybrid_plugin.tools.simulate.policies import DEFAULT_POLICY
from hybrid_plugin.tools.simulate.request import Request
from hybrid_plugin.tools.simulate.simulation import Serving, Simulation


def tokens(start: int, end: int) -> Tokens:
    return array("q", range(start, end))


def request(prompt: Tokens, answer: int = 0, namespace: str | None = None) -> Request:
    """A prompt with an answer of tokens that no prompt has."""
    generated = array("q", [10**9 + len(prompt) + i for i in range(answer)])
    return Request(len(prompt), lambda: prompt, generated, namespace)


def simulate(
    requests: Sequence[Request],
    pages: int,
    slots: int | None = None,
    page_size: int = 4,
    policy: str = DEFAULT_POLICY,
    concurrency: int = 1,
    **options: Any,
) -> Outcome:
    return Simulation(
        Capacity(page_size, pages, slots),
        HybridConfig().snapshot_policy(page_size),
        policy,
        Serving(pace=Pace(concurrency), **options),
    ).run(requests)


def mooncake_line(
    ids: Sequence[int], length: int, output: int = 1, at: float = 0
) -> str:
    return json.dumps(
        {
            "timestamp": at,
            "input_length": length,
            "output_length": output,
            "hash_ids": list(ids),
        }
    )


def write_mooncake(path: Path, prompts: Sequence[Sequence[int]]) -> Path:
    """A trace of prompts of whole blocks of 512 tokens."""
    lines = [mooncake_line(ids, 512 * len(ids)) for ids in prompts]
    path.write_text("\n".join(lines) + "\n")
    return path
