# SPDX-License-Identifier: Apache-2.0
"""How long a forward pass takes, by what it computes and reads.

A pass takes its `Work` times `Costs`, a sum that is linear in both.  So does any
stretch of passes, and a measured run gives the costs by least squares (`calibration`).
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, astuple, dataclass, fields
from operator import add, mul, sub
from pathlib import Path
from typing import Any

from hybrid_plugin.config import ConfigError


@dataclass(frozen=True, slots=True)
class Work:
    """What forward passes did; adds up."""

    passes: float = 0
    prefill_passes: float = 0
    """Of those, passes that computed a part of a prompt."""
    prefill_tokens: float = 0
    """Tokens of prompts that were computed."""
    prefill_pairs: float = 0
    """Pairs of such a token and one that it attends to, itself included; those of a
    window by the share of the layers that have it."""
    decode_sequences: float = 0
    """Sequences that generated a token, summed over passes."""
    kv_tokens: float = 0
    """Tokens whose KV those read."""
    moves: float = 0
    """Passes before which memory moved between elastic pools."""

    def __add__(self, other: Work) -> Work:
        return Work(*map(add, astuple(self), astuple(other)))

    def __sub__(self, other: Work) -> Work:
        return Work(*map(sub, astuple(self), astuple(other)))

    def __mul__(self, factor: float) -> Work:
        return Work(*(value * factor for value in astuple(self)))


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of each kind of work, in the order of the fields of `Work`."""

    pass_s: float
    """A forward pass as such: launching it, and reading the weights."""
    prefill_pass_s: float
    """What one with a part of a prompt takes more: no recorded graph fits it."""
    prefill_token_s: float
    prefill_pair_s: float
    decode_sequence_s: float
    """A sequence in a decode: its states are read and written, a token is sampled."""
    kv_token_s: float
    """A token whose KV a decode reads."""
    move_s: float
    """What a pass waits where memory moves before it."""

    def __post_init__(self) -> None:
        for name, value in zip(COEFFICIENTS, astuple(self), strict=True):
            if not math.isfinite(value) or value < 0:
                raise ConfigError(f"{name} must be seconds, at least 0, got {value}.")
        if not self.pass_s + self.prefill_token_s:
            raise ConfigError("pass_s and prefill_token_s are both 0: no time passes.")

    def seconds(self, work: Work) -> float:
        """Time that work takes."""
        return float(sum(map(mul, astuple(self), astuple(work))))


COEFFICIENTS = tuple(one.name for one in fields(Costs))


@dataclass(frozen=True, slots=True)
class CostModel:
    """Costs, and what they are of."""

    machine: str
    model: str
    source: str
    """How the numbers came about."""
    costs: Costs

    @property
    def title(self) -> str:
        """For people."""
        return f"{self.model} on {self.machine} ({self.source})"

    def write(self, path: Path) -> None:
        """Write the file that `load` reads.

        Raises:
            ConfigError: if it cannot be written.
        """
        text = json.dumps(asdict(self), indent=2) + "\n"
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"Cannot write {path}: {error.strerror}.") from error

    @classmethod
    def load(cls, path: Path) -> CostModel:
        """Read a file: a JSON object of `machine`, `model`, `source` and `costs`.

        Raises:
            ConfigError: if it cannot be read or says something else.
        """
        value = read_object(path, "cost model")
        costs = value.get("costs")
        if set(value) != {"machine", "model", "source", "costs"} or not all(
            isinstance(value[name], str) for name in ("machine", "model", "source")
        ):
            raise ConfigError(
                f"{path} is no cost model: it must say machine, model, source and "
                "costs."
            )
        if (
            not isinstance(costs, dict)
            or set(costs) != set(COEFFICIENTS)
            or not all(type(cost) in (int, float) for cost in costs.values())
        ):
            raise ConfigError(
                f"{path}: costs must be an object of the numbers "
                f"{', '.join(COEFFICIENTS)}."
            )
        try:
            return cls(**value | {"costs": Costs(**costs)})
        except (ConfigError, OverflowError) as error:
            raise ConfigError(f"{path}: {error}") from error


def read_object(path: Path, what: str) -> dict[str, Any]:
    """Read a file that holds a JSON object.

    Raises:
        ConfigError: if it does not; `what` names it.
    """
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"Cannot read the {what} {str(path)!r}: {error.strerror}."
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{str(path)!r} is no {what}: it is no JSON.") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is no {what}: it is no JSON object.")
    return value
