# SPDX-License-Identifier: Apache-2.0
"""What makes answers depend on the batch is refused, with the way out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from hybrid_plugin.sglang import deterministic


def obstacles(page_size: int = 16, **arguments: Any) -> list[str]:
    served = {
        "device": "cuda",
        "enable_deterministic_inference": True,
        "enable_priority_scheduling": False,
        "disable_priority_preemption": False,
        "enable_mixed_chunk": False,
        "enable_lora": None,
        "speculative_algorithm": None,
        "chunked_prefill_size": 256,
    }
    view = SimpleNamespace(**served | arguments)
    return list(deterministic.obstacles(view, page_size))


def test_nothing_stands_in_the_way_of_what_is_deterministic() -> None:
    assert obstacles() == []
    ranked = {"enable_priority_scheduling": True, "disable_priority_preemption": True}
    assert obstacles(**ranked, chunked_prefill_size=128) == []


@pytest.mark.parametrize(
    ("arguments", "way_out"),
    [
        ({"device": "cpu"}, "on a GPU only"),
        ({"enable_deterministic_inference": False}, "--enable-deterministic-inference"),
        ({"enable_priority_scheduling": True}, "--disable-priority-preemption"),
        ({"enable_mixed_chunk": True}, "drop --enable-mixed-chunk"),
        ({"enable_lora": True}, "drop --enable-lora"),
        ({"speculative_algorithm": "NGRAM"}, "drop --speculative-algorithm"),
        ({"chunked_prefill_size": 127}, "to 128 at least"),
        ({"chunked_prefill_size": 256, "page_size": 96}, "to 384 at least"),
    ],
)
def test_each_obstacle_has_a_sentence(arguments: dict[str, Any], way_out: str) -> None:
    (found,) = obstacles(**arguments)
    assert way_out in found
