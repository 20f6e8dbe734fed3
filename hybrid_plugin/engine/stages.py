# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism: what both adapters say of it."""

from __future__ import annotations

from collections.abc import Iterator

from hybrid_plugin.config import HybridConfig


def unserved_options(options: HybridConfig) -> Iterator[str]:
    """Sentences about options that are not served in stages, with the way out.

    Args:
        options: of the plugin.
    """
    if options.is_deterministic:
        yield "deterministic was not tested with pipeline parallelism; drop one."
    for option in ("host_memory", "verify_fraction"):
        if getattr(options, option):
            yield (
                f"{option} is not served with pipeline parallelism yet: leave it out."
            )


def stages_differ(variable: str) -> str:
    """Why pools cannot be elastic where stages have different layers.

    Args:
        variable: of the environment, by which the engine divides layers among stages.
    """
    return (
        "need stages of the pipeline with equally many layers of each kind; let "
        f"{variable} say so, or set elastic to false."
    )
