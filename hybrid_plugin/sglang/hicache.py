# SPDX-License-Identifier: Apache-2.0
"""SGLang's flags for a hierarchical cache: they size the plugin's `host_memory`.

A command that was written for HiCache keeps its flags.  What the device evicts goes to
as much host memory by the plugin's tier, states included.
"""

from __future__ import annotations

from typing import Any

from hybrid_plugin.config import HybridConfig
from hybrid_plugin.sglang import activation
from hybrid_plugin.sglang.log import logger

_GB = 10**9
OFF = {"enable_hierarchical_cache": False}
"""What SGLang is told, whose own cache has none then."""


def obstacle(view: Any) -> str | None:
    """A sentence about what lies behind SGLang's hierarchical cache.

    Args:
        view: of the arguments.
    """
    if not view.enable_hierarchical_cache or view.hicache_storage_backend is None:
        return None
    return (
        "--hicache-storage-backend is for SGLang's own cache; drop it, and give the "
        "plugin's option disk or store."
    )


def take_over(view: Any, options: HybridConfig) -> HybridConfig:
    """Have the plugin take as much host memory as the flags give SGLang's cache.

    The option `host_memory` goes before them.

    Args:
        view: of the arguments.
        options: of the plugin, as they were given.

    Returns:
        The options with which this server and its processes go on.

    Raises:
        ConfigError: if another option excludes host memory.
    """
    if not view.enable_hierarchical_cache:
        return options
    if options.host_memory is not None:
        logger.warning(
            "hybrid-plugin: the option host_memory goes before "
            "--enable-hierarchical-cache and --hicache-size or --hicache-ratio."
        )
        return options
    size = view.hicache_size * _GB if view.hicache_size > 0 else None
    activation.set_option("host_memory", size or f"{view.hicache_ratio:g}x")
    flag = "--hicache-size" if size else "--hicache-ratio"
    logger.info(
        "hybrid-plugin keeps what the device evicts in host memory itself, as much as "
        "%s says, states included; other flags of --enable-hierarchical-cache have no "
        "effect.",
        flag,
    )
    return activation.read_options()
