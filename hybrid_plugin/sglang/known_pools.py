# SPDX-License-Identifier: Apache-2.0
"""Whether the plugin knows all that SGLang keeps of a request.

A snapshot that misses a tensor gives wrong answers.  Newer models keep more than KV
and states: keys that are compressed over several tokens, index keys, states beside
the slots.  So the pools are searched before anything is served: each tensor in them
must be one that the cache's commands copy, or a table that SGLang fills itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from sglang.srt.configs.hybrid_arch import mambaish_config

from hybrid_plugin.engine.refusals import cannot_serve
from hybrid_plugin.sglang.activation import FLAG

_OWN_TABLES = (
    "req_to_token",
    "req_generation",
    "req_index_to_mamba_index_mapping",
    "full_to_swa_index_mapping",
)
"""A row's positions, slot and number of uses, written whenever a request gets it, and
the places of its pages in the window pool, likewise."""
_REPLACED = ("mamba_allocator",)
"""What the plugin puts its own object in the place of."""
_LEAVES = (str, bytes, int, float, type, FunctionType, MethodType, ModuleType)


def side_memory(model_config: Any) -> str | None:
    """What SGLang would keep for a model that the plugin does not know, a sentence.

    Args:
        model_config: SGLang's `ModelConfig`.
    """
    found = kept_beside(model_config)
    return None if found is None else _sentence(found)


def kept_beside(model_config: Any) -> str | None:
    """The same, a few words.

    SGLang's own predicates tell before weights are loaded; `require` makes sure.

    Args:
        model_config: SGLang's `ModelConfig`.
    """
    if model_config.is_hybrid_swa and mambaish_config(model_config) is not None:
        return "a pool for windows beside its states"
    return None


def require(kv_pool: Any, state_pools: Any, copied: Iterable[torch.Tensor]) -> None:
    """Refuse pools that hold more than what the cache's commands copy.

    Args:
        kv_pool: SGLang's pool of keys and values.
        state_pools: its `ReqToTokenPool`, with the slots if there are any.
        copied: all tensors that commands copy, of pages and of slots.

    Raises:
        ConfigError: naming the first tensors that are not known.
    """
    unknown = list(unknown_tensors((kv_pool, state_pools), tuple(copied)))
    if unknown:
        raise cannot_serve(_sentence(", ".join(unknown[:3])))


def unknown_tensors(
    roots: Sequence[Any], copied: Sequence[torch.Tensor]
) -> Iterator[str]:
    """Paths of tensors below `roots` whose memory is not that of `copied`.

    Args:
        roots: objects of SGLang.
        copied: tensors that are known; views of their memory are known as well.
    """
    known = {_memory_of(tensor) for tensor in copied}
    seen: set[int] = set()
    waiting = [(type(root).__name__, root) for root in roots]
    while waiting:
        path, value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if not isinstance(value, torch.Tensor):
            waiting += [(f"{path}.{name}", part) for name, part in _parts(value)]
        elif _memory_of(value) not in known and not _is_table(value, len(copied)):
            yield path


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What an object of SGLang's, or a container, holds; nothing of other objects."""
    if isinstance(value, dict):
        yield from ((str(name), part) for name, part in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((str(number), part) for number, part in enumerate(value))
    elif not isinstance(value, _LEAVES) and _is_sglangs(type(value)):
        names = dict.fromkeys((*_slots(type(value)), *getattr(value, "__dict__", {})))
        for name in names:
            if name not in (*_OWN_TABLES, *_REPLACED) and hasattr(value, name):
                yield name, getattr(value, name)


def _slots(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        names = base.__dict__.get("__slots__", ())
        yield from (names,) if isinstance(names, str) else names


def _is_sglangs(kind: type) -> bool:
    """Whether a class, or one that it extends, is SGLang's."""
    return any(base.__module__.partition(".")[0] == "sglang" for base in kind.__mro__)


def _memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_table(tensor: torch.Tensor, tensors: int) -> bool:
    """Whether it holds nothing, or addresses and strides, one for each tensor."""
    integers = tensor.dtype in (torch.int64, torch.uint64)
    return tensor.numel() == 0 or (
        integers and tensor.dim() == 1 and tensor.numel() <= tensors
    )


def _sentence(found: str) -> str:
    return (
        f"SGLang keeps more of a request of this model than the plugin saves and "
        f"restores ({found}); drop {FLAG}."
    )
