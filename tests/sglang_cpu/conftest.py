# SPDX-License-Identifier: Apache-2.0
"""SGLang chooses its platform once in a process: the one that runs here."""

from __future__ import annotations

import os

import torch

if not torch.accelerator.is_available():
    os.environ.setdefault("SGLANG_PLATFORM", "hybrid_cpu")
