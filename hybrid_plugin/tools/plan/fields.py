# SPDX-License-Identifier: Apache-2.0
"""Reading a model's config.json, where every mistake ends in one sentence."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hybrid_plugin.config import ConfigError

_NESTED = ("text_config", "llm_config", "language_config", "language_model")
"""Where models of several modalities keep what describes their text model."""


MOST = 10**9
"""No size that a configuration names is larger."""


class Fields:
    """A configuration, whose fields have had several names over time."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self._values = values
        self.source = source

    @classmethod
    def load(cls, path: Path) -> Fields:
        """Read a config.json, or the one in a folder.

        Raises:
            ConfigError: if it cannot be read or is no JSON object.
        """
        try:
            path = path / "config.json" if path.is_dir() else path
            text = path.read_bytes()
        except (OSError, ValueError) as error:  # a name may be no name at all
            raise ConfigError(
                f"Cannot read the model configuration {str(path)!r}: "
                f"{getattr(error, 'strerror', None) or error}."
            ) from error
        try:
            values = json.loads(text)
        except (UnicodeDecodeError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"{path} is no model configuration: it is not valid JSON."
            ) from error
        if not isinstance(values, dict):
            raise ConfigError(f"{path} is no model configuration: no JSON object.")
        for name in _NESTED:
            if isinstance(values.get(name), dict):
                values = {**values, **values[name]}
        return cls(values, str(path))

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def text(self, name: str, default: str = "") -> str:
        """A string; anything else counts as absent."""
        value = self._values.get(name)
        return value if isinstance(value, str) else default

    def integer(self, *names: str, default: int | None = None) -> int:
        """The first of these fields that is there, a whole number not below 0.

        Raises:
            ConfigError: if none is and there is no default, or for another value.
        """
        for name in names:
            value = self._values.get(name)
            if value is None:
                continue
            if type(value) is not int or not 0 <= value <= MOST:
                raise ConfigError(
                    f"{self.source}: {name} must be a whole number up to {MOST}, got "
                    f"{value!r:.60}."
                )
            return value
        if default is None:
            raise ConfigError(
                f"{self.source} does not say {' or '.join(names)}, so the model's "
                "layers are unknown; give the config.json of a model that is "
                "supported (see docs/cache.md)."
            )
        return default

    def strings(self, name: str) -> list[str] | None:
        """A list of strings; None if it is absent.

        Raises:
            ConfigError: for anything else.
        """
        found: list[str] | None = self._list(name, str)
        return found

    def integers(self, name: str) -> list[int] | None:
        """A list of whole numbers; None if it is absent.

        Raises:
            ConfigError: for anything else.
        """
        found: list[int] | None = self._list(name, int)
        return found

    def integers_or_one(self, name: str) -> list[int]:
        """A whole number or a list of them; empty if it is absent.

        Raises:
            ConfigError: for anything else.
        """
        if isinstance(self._values.get(name), list):
            return self.integers(name) or []
        return [self.integer(name)] if name in self else []

    def inner(self, name: str) -> Fields | None:
        """A nested object; None if it is absent.

        Raises:
            ConfigError: for anything else.
        """
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise ConfigError(f"{self.source}: {name} must be an object.")
        return Fields(value, f"{self.source}: {name}")

    def _list(self, name: str, kind: type) -> Any:
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not _all(value, kind):
            raise ConfigError(
                f"{self.source}: {name} must be a list of "
                f"{'names' if kind is str else 'whole numbers'}."
            )
        return value


def _all(values: Iterable[Any], kind: type) -> bool:
    return all(isinstance(v, kind) and not isinstance(v, bool) for v in values)
