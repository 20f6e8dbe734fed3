# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism: what is not served in stages.

Every stage runs the same commands before the same passes, on the layers that it has, so
page and slot ids mean the same everywhere.  Several steps are under way at once, each
at another stage; every stage runs them in the order in which they were scheduled.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

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

    if not current_platform.is_cpu():
        yield "pipeline parallelism is served on CPUs only; use tensor parallelism."
    if vllm_config.speculative_config is not None:
        yield (
            "drafts are not served with pipeline parallelism yet; drop "
            "--speculative-config."
        )
    yield from unserved_options(options)
