# SPDX-License-Identifier: Apache-2.0
"""The ranks of an engine: whether one scheduler decides for all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def schedule_for_themselves(vllm_config: VllmConfig) -> bool:
    """Whether each rank has a scheduler of its own, and so a clock of its own.

    An external launcher (torchrun) starts such ranks.  They decide alike only as long
    as nothing that they decide by depends on the time.
    """
    parallel = vllm_config.parallel_config
    launched = parallel.distributed_executor_backend == "external_launcher"
    return launched and bool(parallel.world_size > 1)
