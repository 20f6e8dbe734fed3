# SPDX-License-Identifier: Apache-2.0
"""The GPU worker, apart from the CPU worker: importing that one needs its kernels."""

from __future__ import annotations

from vllm.v1.worker.gpu_worker import Worker

from hybrid_plugin.vllm.worker import RunsCommands


class HybridGPUWorker(RunsCommands, Worker):
    """The CUDA platform's worker."""
