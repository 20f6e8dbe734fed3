# SPDX-License-Identifier: Apache-2.0
"""Rows as JSON and as a table."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from .timing import OURS, Row

NOTES = (
    "Decode bytes are the states read and written once; other operands are left out.",
    "Verify: ours keeps a record of drafts, (slots) and the peers a state for each; "
    "bytes are the main states read once. Commit: ours folds accepted drafts into main "
    "states, (copies) moves a kept state; vLLM goes on from it where it is.",
    "Speed ratio: the peer's time over ours; above 1 ours is faster.",
    "(no slots): reads packed states and writes new ones, where ours updates slots in "
    "place. (no initial states): starts from zeros. (no state): reads and writes none.",
    "Difference: of the peer's output from ours, relative, in the 2-norm; left out "
    "where the states take more than 512 MiB or the peer answers in another form.",
    "Peers' autotuners ran on one sequence of 8192 tokens (decode: on one sequence), "
    "10 ms for each variant. What a peer prepares on the host once per step, chunk "
    "indices and the like, is not timed.",
    "States kept: what follows the convolution of a layer, gates among it, where each "
    "sequence keeps one state near its end; of FlashInfer's, what prepares its inputs "
    "and puts its states into slots is timed too.",
)
LEAST = 0.95


@dataclass(frozen=True)
class Report:
    """What one run measured."""

    rows: list[Row]
    bandwidth: float
    notes: list[str]

    def write(self, out: Path) -> None:
        """Write ``.json`` and ``.md``."""
        notes = [*NOTES, *self.notes]
        result = {
            "versions": versions(),
            "copy_gigabytes_per_second": self.bandwidth,
            "notes": notes,
            "rows": [asdict(row) for row in self.rows],
        }
        out.parent.mkdir(parents=True, exist_ok=True)
        out.with_suffix(".json").write_text(json.dumps(result, indent=1))
        out.with_suffix(".md").write_text(self.text(notes))

    def text(self, notes: list[str]) -> str:
        """Markdown: ours beside each peer, and where a peer is ahead."""
        lines = [
            "# Kernel speed",
            "",
            ", ".join(f"{name} {value}" for name, value in versions().items()),
            "",
            f"Copy bandwidth (read + written, 2 GiB): {self.bandwidth:.0f} GB/s.",
            "",
            *(f"- {note}" for note in notes),
            "",
            f"## Below {LEAST} of the best peer",
            "",
            *(list(self._behind()) or ["Nowhere."]),
            "",
            "## All",
            "",
            "| op | shape | size | us | of copy bandwidth | peer | peer us "
            "| speed ratio | difference |",
            "|---|---|---|---|---|---|---|---|---|",
            *self._lines(),
        ]
        return "\n".join(lines) + "\n"

    def _points(self) -> Iterator[tuple[Row, list[Row]]]:
        points: dict[tuple[str, str, str], list[Row]] = {}
        for row in self.rows:
            points.setdefault((row.op, row.shape, row.size), []).append(row)
        for group in points.values():
            for row in group:
                if row.library == OURS:
                    yield row, [other for other in group if other is not row]

    def _behind(self) -> Iterator[str]:
        for ours, peers in self._points():
            best = min(peers, key=lambda row: row.microseconds, default=None)
            if best and best.microseconds < LEAST * ours.microseconds:
                ratio = best.microseconds / ours.microseconds
                place = f"{ours.op}, {ours.shape}, {ours.size}"
                yield f"- {place}: {ratio:.2f} of {best.library}"

    def _lines(self) -> Iterator[str]:
        for ours, peers in self._points():
            rate = ours.gigabytes_per_second
            share = "" if rate is None else f"{rate / self.bandwidth:.0%}"
            start = (
                f"| {ours.op} | {ours.shape} | {ours.size} "
                f"| {ours.microseconds:.1f} | {share} |"
            )
            for row in peers:
                ratio = row.microseconds / ours.microseconds
                mark = "" if row.mode == ours.mode else f" ({row.mode})"
                apart = "" if row.difference is None else f"{row.difference:.1e}"
                yield (
                    f"{start} {row.library} | {row.microseconds:.1f}{mark} "
                    f"| {ratio:.2f} | {apart} |"
                )
            if not peers:
                yield f"{start} | | | |"


def versions() -> dict[str, str]:
    """What the numbers were taken with."""
    about = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
    }
    for name in (
        "triton",
        "fla",
        "mamba_ssm",
        "causal_conv1d",
        "vllm",
        "sglang",
        "flashinfer",
    ):
        try:
            module = importlib.import_module(name)
        except Exception:
            continue
        about[name] = getattr(module, "__version__", "version unknown")
    return about
