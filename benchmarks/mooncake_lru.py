# SPDX-License-Identifier: Apache-2.0
"""Plain LRU over Mooncake's published trace, against another tool's figures.

    python benchmarks/mooncake_lru.py TRACE --out benchmarks/results/mooncake-lru

Blocks of 512 tokens, KV only, the last half of the requests: 22.2, 54.8, 84.6
and 86.4 % of tokens hit with room for 1, 4 and 16 million tokens and for all.
They may differ a little in what they do with a block that is not full (our cache
keeps whole ones) and with a prompt that hits as a whole (an engine must compute
its last token), so 0.3 points are allowed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from pathlib import Path

from hybrid_plugin.cli import main as command

FIGURES = ((1_000_000, 22.2), (4_000_000, 54.8), (16_000_000, 84.6), (None, 86.4))
"""Tokens of room, and percent."""
TOLERANCE = 0.3


def main() -> int:
    """Run `hybrid-plugin simulate` for each figure; fails if one is far off."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows = [_row(args.trace, room, percent) for room, percent in FIGURES]
    args.out.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
    table = _table(rows)
    args.out.with_suffix(".md").write_text(table)
    print(table)
    return 0 if all(abs(r["difference"]) <= TOLERANCE for r in rows) else 1


def _row(trace: Path, room: int | None, percent: float) -> dict[str, float]:
    flags = (
        "--format mooncake --kv-only --policy lru --measure last-half --json "
        "--concurrency 1 --prompts-only"
    )
    limit = [] if room is None else ["--kv-tokens", str(room)]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = command(["simulate", str(trace), *flags.split(), *limit])
    if status:
        raise SystemExit(status)
    found = json.loads(out.getvalue())
    return {
        "kv_tokens": room or 0,
        "hit_tokens": found["hit_tokens"],
        "queried_tokens": found["queried_tokens"],
        "percent": 100 * found["hit_rate"],
        "figure": percent,
        "difference": 100 * found["hit_rate"] - percent,
    }


def _table(rows: list[dict[str, float]]) -> str:
    lines = [
        "# Plain LRU over Mooncake's trace",
        "",
        "`benchmarks/mooncake_lru.py`: blocks of 512 tokens, KV only, last half of the "
        "requests; the figures are another tool's.",
        "",
        "| room, tokens | hit tokens | of | hit rate | figure | difference, points |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        room = f"{row['kv_tokens']:,}" if row["kv_tokens"] else "unbounded"
        lines.append(
            f"| {room} | {row['hit_tokens']:,} | {row['queried_tokens']:,} | "
            f"{row['percent']:.2f} % | {row['figure']} % | {row['difference']:+.2f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
