# SPDX-License-Identifier: Apache-2.0
"""What both adapters say of stages of a pipeline."""

from __future__ import annotations

from hybrid_plugin.config import HybridConfig
from hybrid_plugin.engine.stages import stages_differ, unserved_options


def test_options_that_are_not_served_in_stages() -> None:
    assert list(unserved_options(HybridConfig())) == []
    asked = {"host_memory": 1 << 20, "verify_fraction": 0.5}
    assert list(unserved_options(HybridConfig.from_mapping(asked))) == [
        "host_memory is not served with pipeline parallelism yet: leave it out.",
        "verify_fraction is not served with pipeline parallelism yet: leave it out.",
    ]


def test_the_way_to_stages_that_are_alike() -> None:
    found = stages_differ("ENGINE_LAYERS")
    assert "let ENGINE_LAYERS say so, or set elastic to false." in found
