# SPDX-License-Identifier: Apache-2.0
"""Triton lightning attention, on the kernels of the shared recurrence."""

from __future__ import annotations

from hybrid_kernels._common.linear_chunk import prefill
from hybrid_kernels._common.linear_verify import steps

__all__ = ["prefill", "steps"]
