# SPDX-License-Identifier: Apache-2.0
"""The page size: what the user asks for, or the least the backends take.

Where no layer has pages, they number the tokens of the tree, and any size will do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybrid_plugin.config import DEFAULT_PAGE_SIZE, ConfigError
from hybrid_plugin.engine import sizing
from hybrid_plugin.vllm.activation import read_options
from hybrid_plugin.vllm.context_parallel import interleave_size, page_ranks
from hybrid_plugin.vllm.servable import UnservableError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_LARGEST = 1024
_BY_BLOCK_COUNT = {"FLEX_ATTENTION"}


def choose(vllm_config: VllmConfig) -> None:
    """Set the engine's block size by the page size; called once layers exist.

    vLLM's block size is what one rank has of a page.

    Raises:
        UnservableError: if no page size suits every attention backend, or the one
            of `--block-size` does not.
        ConfigError: if the plugin's option does not, or contradicts the flag.
    """
    from vllm.config.vllm import set_current_vllm_config
    from vllm.platforms import current_platform

    options, cache = read_options(vllm_config), vllm_config.cache_config
    backends = current_platform._find_non_ssm_backends(vllm_config)
    if not backends:
        cache.block_size = of_states(vllm_config)
        return
    for name in {backend.get_name() for backend in backends} & _BY_BLOCK_COUNT:
        raise UnservableError(
            f"the attention backend {name} sizes its tables by vLLM's own count of "
            "blocks; choose another one by --attention-backend."
        )
    ranks, adjacent = page_ranks(vllm_config), interleave_size(vllm_config)
    with set_current_vllm_config(vllm_config):
        accepted = [
            rows * ranks
            for rows in range(1, _LARGEST + 1)
            if all(backend.supports_block_size(rows) for backend in backends)
            and not rows % adjacent
        ]
    asked = _asked(vllm_config)
    names = ", ".join(backend.get_name() for backend in backends)
    if not accepted:
        raise UnservableError(
            f"no page size up to {_LARGEST} suits all attention backends ({names})."
        )
    if asked is not None and asked not in accepted:
        some = ", ".join(map(str, accepted[:4]))
        # What vLLM alone would round up must not keep it from starting.
        kind = UnservableError if options.page_size is None else ConfigError
        raise kind(
            f"Page size {asked} does not suit the attention backend ({names}), which "
            f"takes {some}, ...; change page_size or --block-size, or leave them out."
        )
    size = asked or next((s for s in accepted if s >= DEFAULT_PAGE_SIZE), accepted[-1])
    cache.block_size = size // ranks


def of_states(vllm_config: VllmConfig) -> int:
    """Tokens in a page of a model with state layers alone.

    Raises:
        ConfigError: if the plugin's option contradicts the flag.
    """
    return _asked(vllm_config) or DEFAULT_PAGE_SIZE


def _asked(vllm_config: VllmConfig) -> int | None:
    """Tokens in a page that the user asked for."""
    cache = vllm_config.cache_config
    options, flag = read_options(vllm_config), "--block-size"
    if not cache.user_specified_block_size:
        return sizing.asked_page_size(options, flag, None)
    rows, ranks = cache.block_size, page_ranks(vllm_config)
    if ranks > 1:
        flag += f" {rows} on {ranks} ranks, which makes pages of"
    return sizing.asked_page_size(options, flag, rows * ranks)
