# SPDX-License-Identifier: Apache-2.0
"""What servers publish of prompts and of bytes that came from elsewhere."""

from __future__ import annotations

import re
from collections.abc import Mapping

_SERIES = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_KEPT = (
    "vllm:prompt_tokens",
    "vllm:nixl_",
    "vllm:num_preemptions",
    "hybrid_cache_peer_",
    "hybrid_cache_host_",
)
_ENDINGS = ("_total", "_sum", "_count")
_TELLING = ("source", "reason")
"""Labels that counters are told apart by."""
COMPUTED = "vllm:prompt_tokens_by_source{local_compute}"
MOVED = ("hybrid_cache_peer_loaded_bytes", "vllm:nixl_bytes_transferred_sum")
FAILED = (
    "hybrid_cache_peer_load_failures",
    "hybrid_cache_peer_loads_refused",
    "vllm:nixl_num_failed_transfers",
    "vllm:nixl_num_failed_notifications",
    "vllm:nixl_num_kv_expired_reqs",
)
"""Prefixes that were to be moved and were not."""
OF_THE_PLUGIN = "hybrid_cache_"

Counters = Mapping[str, float]
"""By name, as `NAME{SOURCE}` or `NAME{REASON}` where a series has such a label."""


def read(text: str) -> dict[str, float]:
    """Counters that matter here, summed over engines and other labels.

    Args:
        text: of a server's `/metrics`.
    """
    found: dict[str, float] = {}
    for line in text.splitlines():
        series = _SERIES.match(line)
        if series is None:
            continue
        name, labels, value = series.groups()
        if not name.startswith(_KEPT) or not name.endswith(_ENDINGS):
            continue
        name = name.removesuffix("_total")
        known = dict(_LABEL.findall(labels or ""))
        for label in _TELLING:
            if label in known:
                name += f"{{{known[label]}}}"
        found[name] = found.get(name, 0.0) + float(value)
    return found


def since(before: Counters, now: Counters) -> dict[str, float]:
    """What was counted between two readings, without what was not."""
    grown = {name: value - before.get(name, 0.0) for name, value in now.items()}
    return {name: value for name, value in grown.items() if value}


def moved(counted: Counters) -> float:
    """Bytes that a server has read from another one."""
    return sum(counted.get(name, 0.0) for name in MOVED)


def failed(counted: Counters) -> float:
    """Prefixes that a server was to move and did not."""
    return sum(value for name, value in counted.items() if name.split("{")[0] in FAILED)
