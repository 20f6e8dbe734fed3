# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism: what is not served in stages.

Every stage runs the same commands before the same passes, on the layers that it has, so
page and slot ids mean the same everywhere.  Several steps are under way at once, each
at another stage; every stage runs them in the order in which they were scheduled.

On a GPU vLLM has one step more under way than there are stages, and schedules a decode
of the same request again only after as many steps as there are stages.  So a request is
at most one token ahead of what the scheduler has read of it, as without stages.

A rank that moves memory between pools waits for the stream of its passes, and not for
the device: other streams have messages that other ranks take later.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hybrid_plugin.engine import untried
from hybrid_plugin.engine.stages import unserved_options

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from hybrid_plugin.config import HybridConfig


def obstacles(vllm_config: VllmConfig, options: HybridConfig) -> Iterator[str]:
    """Sentences about what the plugin does not serve in stages, with the way out.

    Args:
        vllm_config: of an engine with several.
        options: of the plugin.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() and untried.is_refused(untried.STAGES):
        yield "pipeline parallelism is served on CPUs only; use tensor parallelism."
    if vllm_config.speculative_config is not None:
        yield (
            "drafts are not served with pipeline parallelism yet; drop "
            "--speculative-config."
        )
    elif not current_platform.is_cpu() and not vllm_config.use_v2_model_runner:
        yield (
            "pipeline parallelism on GPUs needs vLLM's second model runner; leave "
            "VLLM_USE_V2_MODEL_RUNNER and the external launcher out."
        )
    yield from unserved_options(options)
