# SPDX-License-Identifier: Apache-2.0
"""Servers and reference answers that the engine tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.engines.server import FAULTS, Server, free_port, vllm_launch

MODEL = Path(__file__).parents[1] / "assets" / "tiny-qwen3-next"
MAX_MODEL_LEN = 1024
FLAGS = (
    "--dtype=bfloat16",
    "--enforce-eager",
    f"--max-model-len={MAX_MODEL_LEN}",
    "--max-num-seqs=16",
    "--max-num-batched-tokens=96",
    "--kv-cache-memory-bytes=64M",
)

StartServer = Callable[..., AbstractContextManager[Server]]


@pytest.fixture(scope="session")
def start_server(tmp_path_factory: pytest.TempPathFactory) -> StartServer:
    """Start `vllm serve` on the bundled model."""

    @contextmanager
    def start(
        name: str,
        *,
        options: Mapping[str, Any] | None = None,
        plugin: bool = True,
        flags: Sequence[str] = (),
        fault: str | None = None,
    ) -> Iterator[Server]:
        port = free_port()
        environment = {}
        if fault is not None:
            environment = {"PYTHONPATH": str(FAULTS), "HYBRID_TEST_FAULT": fault}
        launch = vllm_launch(
            MODEL,
            port,
            options=options,
            plugin=plugin,
            flags=(*FLAGS, *flags),
            environment=environment,
        )
        log = tmp_path_factory.mktemp("servers") / f"{name}.log"
        with Server(launch, port, log) as server:
            yield server

    return start
