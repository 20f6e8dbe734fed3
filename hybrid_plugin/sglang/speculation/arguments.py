# SPDX-License-Identifier: Apache-2.0
"""SGLang's arguments about drafts: what is refused, and the page size of trees."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hybrid_plugin.sglang.activation import FLAG

SERVED = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM")
_PAGED_TREES = {"NGRAM": ("flashinfer",)}
"""Attention backends that verify trees in pages, where they are fewer than those below;
SGLang refuses the others."""
_PAGED_TREES_OF_DRAFT_MODELS = ("flashinfer", "fa3", "triton")


def conflicts(view: Any, *, windows: bool) -> Iterator[str]:
    """Sentences about what the plugin does not support, with the way out.

    Args:
        view: SGLang's resolved arguments.
        windows: whether the model has a pool for windows.
    """
    name = algorithm(view)
    if name is None:
        return
    if not _is_served(name):
        yield (
            f"--speculative-algorithm {name} is not supported yet; use NEXTN, EAGLE, "
            "EAGLE3, STANDALONE or NGRAM."
        )
    if windows:
        yield (
            "drafts are not supported yet for models with windows; drop "
            f"--speculative-algorithm, or {FLAG}."
        )
    if view.enable_multi_layer_eagle:
        yield (
            "drafts by several layers are not supported yet; drop "
            "--enable-multi-layer-eagle."
        )
    if view.speculative_adaptive:
        yield "the number of drafts must be fixed; drop --speculative-adaptive."
    if view.enable_mixed_chunk:
        yield (
            "batches that mix prompts with drafts are not supported yet; drop "
            "--enable-mixed-chunk."
        )


def algorithm(view: Any) -> str | None:
    """The name of the speculative algorithm, None without one."""
    name: str | None = view.speculative_algorithm
    return None if name is None else name.upper()


def needs_single_tokens(view: Any) -> bool:
    """Whether the attention backend verifies trees in pages of one token only."""
    name = algorithm(view)
    if name is None:
        return False
    paged = _PAGED_TREES.get(name, _PAGED_TREES_OF_DRAFT_MODELS)
    breadth = view.speculative_eagle_topk
    if name == "NGRAM":
        breadth = view.speculative_ngram_max_bfs_breadth
    return (breadth or 1) > 1 and view.attention_backend not in paged


def _is_served(name: str) -> bool:
    """Whether SGLang's own algorithm is, or another plugin's works like one of them."""
    if name in SERVED:
        return True
    from sglang.srt.speculative.spec_registry import get_spec

    registered = get_spec(name)
    return registered is not None and (registered.is_ngram() or registered.is_eagle())
