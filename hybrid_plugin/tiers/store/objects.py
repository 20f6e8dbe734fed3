# SPDX-License-Identifier: Apache-2.0
"""ObjectStore: what is asked of a store, in one place, so that tests can fail it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class ObjectStore(Protocol):
    """Objects by name, which may vanish at any time.

    All methods raise OSError if the store does not answer, with ENOSPC if it is full;
    any thread may call them.
    """

    def get(self, names: Sequence[str]) -> list[bytes | None]:
        """The objects of these names; None for each that is not there."""

    def put(self, name: str, content: bytes | memoryview) -> None:
        """Keep an object, in the place of any other of its name."""

    def remove(self, names: Sequence[str]) -> None:
        """Remove objects, where they are there."""

    def exist(self, names: Sequence[str]) -> list[bool]:
        """Which of them are there."""

    def close(self) -> None:
        """Leave the store; what this process lent to it is gone."""
