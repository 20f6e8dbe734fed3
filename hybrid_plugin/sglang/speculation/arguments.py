# SPDX-License-Identifier: Apache-2.0
"""SGLang's arguments about drafts: what is refused, and the page size of trees."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from sglang.srt.environ import envs

from hybrid_plugin.config import HybridConfig
from hybrid_plugin.engine.kernel_choice import Mixer, are_recorded
from hybrid_plugin.sglang import disaggregation
from hybrid_plugin.sglang.activation import FLAG
from hybrid_plugin.sglang.kernels.choice import mixer_of

_BLOCKS = ("DFLASH", "DSPARK")
"""Draft models that propose a block at once."""
SERVED = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM", *_BLOCKS)
_PAGED_TREES = {"NGRAM": ("flashinfer",)}
"""Attention backends that verify trees in pages, where they are fewer than those below;
SGLang refuses the others."""
_PAGED_TREES_OF_DRAFT_MODELS = ("flashinfer", "fa3", "triton")
_STATIC = "static"
"""SGLang's default: DSPARK's confidence in its drafts is not used."""
MOST_REQUESTS = 2048
"""SGLang runs so many at once, if there is room, unless told otherwise."""
_RECORDED = (Mixer.GATED_DELTA_NET, Mixer.KDA, Mixer.MAMBA2)


def conflicts(
    view: Any, *, windows: bool, compressed: bool = False, rings: bool = False
) -> Iterator[str]:
    """Sentences about what the plugin does not support, with the way out.

    Args:
        view: SGLang's resolved arguments.
        windows: whether the model has a pool for windows.
        compressed: whether its attention chooses by compressed keys.
        rings: whether its index keys stand for several tokens each.
    """
    name = algorithm(view)
    if name is None:
        return
    if not _is_served(name):
        yield (
            f"--speculative-algorithm {name} is not supported yet; use NEXTN, EAGLE, "
            "EAGLE3, STANDALONE, NGRAM, DFLASH or DSPARK."
        )
    if windows:
        yield (
            "drafts are not supported yet for models with windows; drop "
            f"--speculative-algorithm, or {FLAG}."
        )
    if compressed:
        yield (
            "drafts are not supported yet for models with compressed keys; drop "
            f"--speculative-algorithm, or {FLAG}."
        )
    # N-grams are padded to a width, by children of the root, whatever their breadth.
    if rings and (name == "NGRAM" or (view.speculative_eagle_topk or 1) > 1):
        yield (
            "where index keys stand for several tokens each, SGLang can verify chains "
            "of drafts only, and n-grams are trees; use NEXTN or EAGLE with "
            "--speculative-eagle-topk 1."
        )
    if rings and name in _BLOCKS:
        yield (
            f"{name} is not served yet where index keys stand for several tokens each; "
            "use NEXTN or EAGLE with --speculative-eagle-topk 1."
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
    if name == "DFLASH" and view.speculative_draft_window_size is not None:
        yield (
            "DFLASH with a cache of its draft model's own is not supported yet; drop "
            "--speculative-draft-window-size."
        )
    if name in _BLOCKS and disaggregation.sends(view):
        yield (
            f"{name} is not served in prefill servers yet; drop "
            "--speculative-algorithm."
        )
    mode = envs.SGLANG_RAGGED_VERIFY_MODE.get()
    if name == "DSPARK" and mode != _STATIC:
        yield (
            f"DSPARK must verify equally many drafts of each request; set "
            f"SGLANG_RAGGED_VERIFY_MODE to {_STATIC}, and not to {mode}, or unset it."
        )


def unrecorded(view: Any, options: HybridConfig, model: Any) -> Iterator[str]:
    """Likewise, about `draft_states`.

    Args:
        view: SGLang's resolved arguments.
        options: of the plugin.
        model: SGLang's `ModelConfig`.
    """
    if is_replayed(view, options, model) and mixer_of(model) not in _RECORDED:
        yield (
            "draft_states is replay, and there are no kernels for it for the state "
            "layers of this model: leave it out."
        )


def is_replayed(view: Any, options: HybridConfig, model: Any) -> bool:
    """Whether drafts are recorded, and their states not kept; arguments as above."""
    return algorithm(view) is not None and records_drafts(options, model)


def records_drafts(options: HybridConfig, model: Any) -> bool:
    """Whether drafts would be recorded, if there were any; arguments as above."""
    return are_recorded(options, partial(mixer_of, model), "sglang")


def running_requests(view: Any, options: HybridConfig, model: Any) -> dict[str, int]:
    """How many requests run, where SGLang would have fewer run because of drafts.

    Its default with drafts is 48, for the memory of their states.  Arguments as above.
    """
    if view.max_running_requests is not None or not is_replayed(view, options, model):
        return {}
    return {"max_running_requests": MOST_REQUESTS * max(view.attn_dp_size, 1)}


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
