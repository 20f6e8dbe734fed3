# SPDX-License-Identifier: Apache-2.0
"""The CPU worker."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from hybrid_plugin.vllm.worker import RunsCommands


class HybridCPUWorker(RunsCommands, CPUWorker):
    """The CPU platform's worker."""
