# SPDX-License-Identifier: Apache-2.0
"""What tells the weights of one LoRA adapter from those of another.

vLLM names adapters after what a user calls them.  Under that name, and even under the
same number, other weights may be loaded later: from another path, or in place.  So the
cache's name for an adapter counts how often that happened.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Set
from dataclasses import dataclass
from typing import Any

from hybrid_plugin.engine.bundle_identity import AdapterNames


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter as this process has loaded it; it has no name that lasts longer."""

    name: str
    path: str
    number: int
    """vLLM's, by which its workers know the weights."""
    changes: int
    """How often weights under that number were replaced or removed."""


class Adapters:
    """Names of the adapters of one engine core."""

    def __init__(self, lasting: AdapterNames | None = None) -> None:
        """Begin with none loaded.

        Args:
            lasting: names by weights, where content outlives the process.
        """
        self._lasting = lasting
        self._changes: Counter[int] = Counter()
        """By number."""
        self._replaced: set[int] = set()
        """Numbers under which weights were loaded over others."""
        self._named: defaultdict[int, set[Hashable]] = defaultdict(set)
        """Names by number, of the weights that are there now."""

    def changed(self, number: int, *, in_place: bool) -> Set[Hashable]:
        """Note that the weights under a number are others from now on, or none.

        Args:
            number: vLLM's.
            in_place: whether others are there, and not none.

        Returns:
            Names of those that were there.
        """
        self._changes[number] += 1
        if in_place:
            self._replaced.add(number)
        else:
            self._replaced.discard(number)
        return self._named.pop(number, set())

    def name_of(self, adapter: Any) -> Hashable:
        """What requests with equal weights have in common, and no others.

        Args:
            adapter: vLLM's `LoRARequest`, or what has its entries.
        """
        number = int(adapter.lora_int_id)
        changes = self._changes[number]
        name, path = str(adapter.lora_name), str(adapter.lora_path)
        found: Hashable = LoadedAdapter(name, path, number, changes)
        # Over other weights, in place: whoever still names their path has the new ones.
        is_named = not (adapter.load_inplace or number in self._replaced)
        if self._lasting is not None and is_named:
            found = self._lasting.of(path, (number, changes)) or found
        self._named[number].add(found)
        return found


def is_of(namespace: Hashable, names: Set[Hashable]) -> bool:
    """Whether a namespace is that of an adapter with one of the names."""
    return isinstance(namespace, tuple) and namespace[0] in names


def namespace_of(adapter: Any, salt: object, adapters: Adapters) -> Hashable:
    """What requests must have in common beside tokens.

    Args:
        adapter: vLLM's `LoRARequest`, or what has its entries; None for none.
        salt: of the request.
        adapters: of the engine core.
    """
    lora = adapters.name_of(adapter) if adapter else None
    if lora is None and salt is None:
        return None
    # A salt that is no string cannot come from vLLM's own front end.
    return lora, salt if salt is None or isinstance(salt, str) else repr(salt)
