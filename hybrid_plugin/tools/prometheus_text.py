# SPDX-License-Identifier: Apache-2.0
"""Reads the text that servers publish at `/metrics`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_SERIES = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Series:
    """One number with its name and labels."""

    name: str
    labels: Mapping[str, str]
    value: float


class Metrics:
    """What a server published at one moment."""

    def __init__(self, text: str) -> None:
        self._series = [s for line in text.splitlines() if (s := _parse(line))]

    def total(self, name: str, **labels: str) -> float | None:
        """The sum over all series with these labels; None where there is none."""
        found = [
            series.value
            for series in self._series
            if series.name == name and labels.items() <= series.labels.items()
        ]
        return sum(found) if found else None

    def by(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """Sums over all series of a name, by the values of some labels."""
        found: dict[tuple[str, ...], float] = {}
        for series in self._series:
            if series.name == name:
                key = tuple([series.labels.get(label, "") for label in labels])
                found[key] = found.get(key, 0.0) + series.value
        return found

    def label(self, name: str, label: str) -> str | None:
        """A label of the first series of that name that has it."""
        for series in self._series:
            if series.name == name and label in series.labels:
                return series.labels[label]
        return None


def _parse(line: str) -> Series | None:
    match = _SERIES.match(line)
    if match is None:
        return None
    name, labels, value = match.groups()
    return Series(name, dict(_LABEL.findall(labels or "")), float(value))
