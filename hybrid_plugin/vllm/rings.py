# SPDX-License-Identifier: Apache-2.0
"""Rings of tokens that no index key stands for yet.

An index key stands for several tokens in turn, and lies in the pages with their KV.
Until the last of these tokens is computed, their own keys wait in a ring.  vLLM gives
each request a block for it.  What is in it is part of what a sequence must have to go
on, exactly as its states are; so here the ring is a part of the slot, and whatever
moves a slot moves its ring.

A turn may end between the tokens of a key.  So a pass must take what waits for it
wherever it begins, which is the business of the model's kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheSpec

KIND: Final = "CircularBufferSpec"
"""Name of vLLM's spec of a ring."""
_TAKEN_ANYWHERE = ("vllm.models.qwen4_exp",)
"""Packages of models whose kernels take what waits wherever a pass begins, as an H200
has shown (`tests/engines/test_rings_vllm.py`)."""
NO_DRAFTS = (
    "drafts for models that keep tokens in rings are not supported yet; drop "
    "--speculative-config."
)


def are_served(module: str | None) -> bool:
    """Whether the rings of a model can be parts of slots.

    Args:
        module: of vLLM, with the model's class or a layer's; None if that is not known.
    """
    return any(f"{module}.".startswith(f"{known}.") for known in _TAKEN_ANYWHERE)


def are_among(specs: Mapping[str, KVCacheSpec]) -> bool:
    """Whether some layers keep rings.

    Args:
        specs: what the layers declare.
    """
    return any(map(is_ring, specs.values()))


def is_ring(spec: KVCacheSpec) -> bool:
    """Whether a spec, of vLLM's or ours, is that of a ring."""
    from vllm.v1.kv_cache_interface import CircularBufferSpec

    return isinstance(spec, CircularBufferSpec)


def obstacle(
    layers: Mapping[str, Any], specs: Mapping[str, KVCacheSpec], *, drafts: bool
) -> str | None:
    """Why the rings of a built model cannot be served, a sentence; None if they can.

    Args:
        layers: of the model, by name.
        specs: what they declare.
        drafts: whether some are verified: they would wait in the ring before it is
            known whether they count.
    """
    rings = [name for name, spec in specs.items() if is_ring(spec)]
    for name in rings:
        if not are_served(type(layers[name]).__module__):
            return f"the plugin cannot serve layer {name}, which keeps a {KIND}."
    return NO_DRAFTS if rings and drafts else None
