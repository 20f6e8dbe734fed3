# SPDX-License-Identifier: Apache-2.0
"""Calling an engine's linear layer."""

from __future__ import annotations

import torch
from torch import nn


def project(linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What a linear layer of a kit makes of ``[T, inner]``.

    SGLang's give a bias to be added later as well, and so do the layers that it puts in
    their place for adapters.
    """
    found = linear(x)
    result: torch.Tensor = found[0] if isinstance(found, tuple) else found
    return result
