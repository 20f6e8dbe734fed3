# SPDX-License-Identifier: Apache-2.0
"""What the core orders, on real copies whose queues run in any order."""

from __future__ import annotations

import random

import pytest

from tests.core.test_host_traffic import KINDS, traffic_of
from tests.device.mirror import Mirror

SEEDS = range(4)
OPERATIONS = 250


def mirrored(kind: str, seed: int, deaf: tuple[str, str] | None = None) -> Mirror:
    """Real pools that followed random traffic to its end."""
    traffic = traffic_of(kind, seed, (1, 4, 16)[seed % 3])
    mirror = Mirror(traffic.engine.device, random.Random(seed), deaf)
    for _ in range(OPERATIONS):
        traffic.operate()
    mirror.finish()
    return mirror


@pytest.mark.parametrize("kind", KINDS)
def test_real_rows_hold_what_the_core_takes_them_to_hold(kind: str) -> None:
    mirrors = [mirrored(kind, seed) for seed in SEEDS]
    assert [mirror.wrong for mirror in mirrors] == [[] for _ in SEEDS]
    assert sum(mirror.loaded for mirror in mirrors) > 20


@pytest.mark.parametrize(
    "deaf", [("stores", "model"), ("scatters", "loads"), ("model", "scatters")]
)
def test_copies_that_wait_for_nothing_are_found(deaf: tuple[str, str]) -> None:
    assert any(mirrored("fixed", seed, deaf).wrong for seed in SEEDS)
