# SPDX-License-Identifier: Apache-2.0
"""The ranks of an engine: how many share a machine, and who decides for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybrid_plugin.engine.host_memory import check_room, free_bytes

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from hybrid_plugin.config import HybridConfig


REPLICAS_KEY = "hybrid_plugin_replicas_here"
"""Key in the additional configuration, where a server starts several replicas."""


def settle_replicas(vllm_config: VllmConfig, options: HybridConfig) -> None:
    """Check that all replicas of a server have room, and note how many they are.

    Each looks at the machine when it starts, and does not see what the others are about
    to take.  A replica of a model without experts is told that it is the only one.

    Args:
        vllm_config: of the server, before its replicas are started.
        options: of the plugin.

    Raises:
        ConfigError: if the machine has less host memory than they want.
    """
    extra = vllm_config.additional_config
    count = vllm_config.parallel_config.data_parallel_size_local
    if count < 2 or not isinstance(extra, dict):
        return
    vllm_config.additional_config = {**extra, REPLICAS_KEY: count}
    if options.host_memory is not None:
        check_room(options.host_memory, on_this_machine(vllm_config), free_bytes())


def on_this_machine(vllm_config: VllmConfig) -> int:
    """Ranks of a server that share this machine's memory, those of all its replicas."""
    extra = vllm_config.additional_config
    noted = extra.get(REPLICAS_KEY, 1) if isinstance(extra, dict) else 1
    return int(vllm_config.parallel_config.local_world_size * noted)


def schedule_for_themselves(vllm_config: VllmConfig) -> bool:
    """Whether each rank has a scheduler of its own, and so a clock of its own.

    An external launcher (torchrun) starts such ranks.  They decide alike only as long
    as nothing that they decide by depends on the time.
    """
    parallel = vllm_config.parallel_config
    launched = parallel.distributed_executor_backend == "external_launcher"
    return launched and bool(parallel.world_size > 1)
