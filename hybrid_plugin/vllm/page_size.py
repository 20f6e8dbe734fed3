# SPDX-License-Identifier: Apache-2.0
"""The page size: what the user asks for, or the least the backends take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybrid_plugin.config import DEFAULT_PAGE_SIZE, ConfigError
from hybrid_plugin.vllm.activation import read_options
from hybrid_plugin.vllm.servable import UnservableError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_LARGEST = 1024


def choose(vllm_config: VllmConfig) -> None:
    """Set the engine's block size to the page size; called once layers exist.

    Raises:
        UnservableError: if no page size suits every attention backend, or the one
            of `--block-size` does not.
        ConfigError: if the plugin's option does not.
    """
    from vllm.config.vllm import set_current_vllm_config
    from vllm.platforms import current_platform

    backends = current_platform._find_non_ssm_backends(vllm_config)
    with set_current_vllm_config(vllm_config):
        accepted = [
            size
            for size in range(1, _LARGEST + 1)
            if all(backend.supports_block_size(size) for backend in backends)
        ]
    asked = _asked_for(vllm_config)
    names = ", ".join(backend.get_name() for backend in backends)
    if not accepted:
        raise UnservableError(
            f"no page size up to {_LARGEST} suits all attention backends ({names})."
        )
    if asked is not None and asked not in accepted:
        some = ", ".join(map(str, accepted[:4]))
        options = read_options(vllm_config)
        # What vLLM alone would round up must not keep it from starting.
        kind = UnservableError if options.page_size is None else ConfigError
        raise kind(
            f"Page size {asked} does not suit the attention backend ({names}), which "
            f"takes {some}, ...; change page_size or --block-size, or leave them out."
        )
    size = asked or next((s for s in accepted if s >= DEFAULT_PAGE_SIZE), accepted[-1])
    vllm_config.cache_config.block_size = size


def _asked_for(vllm_config: VllmConfig) -> int | None:
    """What the option or the flag says.

    Raises:
        ConfigError: if they contradict each other.
    """
    wanted = read_options(vllm_config).page_size
    cache = vllm_config.cache_config
    flag: int | None = cache.block_size if cache.user_specified_block_size else None
    if wanted is not None and flag not in (None, wanted):
        raise ConfigError(
            f"--block-size {flag} and the option page_size {wanted} contradict each "
            "other: give one of them."
        )
    return flag if wanted is None else wanted
