# SPDX-License-Identifier: Apache-2.0
"""Stores and loads on the kernels that a GPU runs: the same as on a CPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from hybrid_plugin.device.host.queues import queues_for
from tests.device.traffic import Traffic


def test_the_model_finds_what_commands_say(
    on_triton: Callable[[], Any], device: str
) -> None:
    with on_triton():
        queues = queues_for(torch.device(device))
        traffic = Traffic(random.Random(3), queues, lambda: None, device)
        for _ in range(60):
            traffic.step()
        traffic.finish()
    assert traffic.wrong == []
