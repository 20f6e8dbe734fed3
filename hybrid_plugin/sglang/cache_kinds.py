# SPDX-License-Identifier: Apache-2.0
"""What a model keeps beside states and the KV of full attention, in words."""

from __future__ import annotations

from typing import Any

from sglang.srt.configs.hybrid_arch import mambaish_config

from hybrid_plugin.sglang.compressed_keys import has_compressed_keys
from hybrid_plugin.sglang.index_keys import has_index_keys
from hybrid_plugin.sglang.side_states import has_side_states


def kept_beside(model: Any, *, windows: bool) -> list[str]:
    """The kinds of caches that not every way of serving takes along.

    Args:
        model: SGLang's `ModelConfig`.
        windows: whether the model has a pool for attention with windows.
    """
    kinds = (
        ("attention windows", windows),
        ("index keys", has_index_keys(model)),
        ("compressed keys", has_compressed_keys(model)),
        ("states of n-grams", has_side_states(mambaish_config(model))),
    )
    return [name for name, is_kept in kinds if is_kept]
