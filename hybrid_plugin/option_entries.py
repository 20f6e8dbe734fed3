# SPDX-License-Identifier: Apache-2.0
"""Entries of options that are objects, such as `disk` and `store`, checked.

Such an option is a dataclass.  A field is an entry: a string where its type says so, or
a size in bytes where it is a whole number; without a default, it must be given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from typing import Any

from hybrid_plugin.errors import ConfigError
from hybrid_plugin.sizes import parse_bytes


def read_entries(option: str, cls: type, value: Any, example: str) -> dict[str, Any]:
    """Read an option as JSON gives it.

    Args:
        option: its name.
        cls: its dataclass, whose fields are of type `str`, `str | None` or `int`.
        value: what was given.
        example: of the object that it takes, for the message.

    Returns:
        The entries given, sizes as bytes.

    Raises:
        ConfigError: for anything but an object of known entries of their types.
    """
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"hybrid_plugin option {option!r} takes an object such as {example}, got "
            f"{value!r}."
        )
    known = {field.name: field for field in fields(cls)}
    for name in value:
        if name not in known:
            raise ConfigError(
                f"Unknown entry {name!r} of hybrid_plugin option {option!r}; known "
                f"are: {', '.join(known)}."
            )
    for name, field in known.items():
        if field.default is MISSING and name not in value:
            raise ConfigError(f"hybrid_plugin option {option!r} needs a {name}.")
    return {n: _read(f"{option}.{n}", known[n], entry) for n, entry in value.items()}


def check_weights(option: str, weights: str | None) -> None:
    """Check the name of a model's weights, which several options take.

    Args:
        option: its name.
        weights: the name; None if they are told by their files.

    Raises:
        ConfigError: for an empty one.
    """
    if weights == "":
        raise ConfigError(
            f"{option}.weights is empty: name the weights or leave it out."
        )


def _read(name: str, field: Field[Any], entry: Any) -> Any:
    if field.type == "int":
        return _read_size(name, entry)
    may_be_none = field.type == "str | None"
    if not isinstance(entry, str) and not (may_be_none and entry is None):
        raise ConfigError(f"{name} takes a string, got {entry!r}.")
    return entry


def _read_size(name: str, entry: Any) -> int:
    if isinstance(entry, str):
        try:
            return parse_bytes(entry)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from error
    if isinstance(entry, bool) or not isinstance(entry, int):
        raise ConfigError(f"{name} takes a size such as 100GiB, got {entry!r}.")
    return entry
