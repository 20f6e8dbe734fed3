# SPDX-License-Identifier: Apache-2.0
"""The CPU worker."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from hybrid_plugin.vllm import patches
from hybrid_plugin.vllm.worker import RunsCommands


class HybridCPUWorker(RunsCommands, CPUWorker):
    """The CPU platform's worker."""

    def compile_or_warm_up_model(self) -> Any:
        """Compile the model, and have room for what an earlier stage sends."""
        patches.make_stage_buffers(self.model_runner)
        return super().compile_or_warm_up_model()
