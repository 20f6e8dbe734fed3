# SPDX-License-Identifier: Apache-2.0
"""Servers and reference answers that the engine tests share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.server import FAULTS, Server, free_port, vllm_launch

MODEL = Path(__file__).parents[1] / "assets" / "tiny-qwen3-next"
MAX_MODEL_LEN = 1024
ON_GPU = torch.cuda.is_available()
PAGE_SIZE = 16 if ON_GPU else 32
"""The least that the platform's attention backend takes."""

FLAGS = (
    f"--max-model-len={MAX_MODEL_LEN}",
    "--max-num-seqs=16",
    "--max-num-batched-tokens=96",
    "--kv-cache-memory-bytes=64M",
    *(
        (
            "--gdn-prefill-backend=triton",
            "--gpu-memory-utilization=0.2",
            "--cudagraph-capture-sizes",
            "1",
            "4",
            "16",
        )
        if ON_GPU
        else ("--enforce-eager",)
    ),
)

StartServer = Callable[..., AbstractContextManager[Server]]


@pytest.fixture(scope="session")
def start_server(tmp_path_factory: pytest.TempPathFactory) -> StartServer:
    """Start `vllm serve`, on the bundled model unless told otherwise."""

    @contextmanager
    def start(
        name: str,
        *,
        options: Mapping[str, Any] | None = None,
        plugin: bool = True,
        flags: Sequence[str] = (),
        fault: str | None = None,
        dtype: str = "bfloat16",
        model: Path = MODEL,
    ) -> Iterator[Server]:
        port = free_port()
        # Without it, Triton rounds float32 operands to 10 bits of mantissa.
        environment = {"TRITON_F32_DEFAULT": "ieee"} if dtype == "float32" else {}
        if fault is not None:
            path = os.pathsep.join([str(FAULTS), os.environ.get("PYTHONPATH", "")])
            environment |= {"PYTHONPATH": path, "HYBRID_TEST_FAULT": fault}
        launch = vllm_launch(
            model,
            port,
            options=options,
            plugin=plugin,
            flags=(*FLAGS, f"--dtype={dtype}", *flags),
            environment=environment,
        )
        log = tmp_path_factory.mktemp("servers") / f"{name}.log"
        with Server(launch, port, log) as server:
            yield server

    return start
