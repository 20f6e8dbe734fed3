# SPDX-License-Identifier: Apache-2.0
"""The layers' rates of decay, made of their weights once and kept up to date."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch


class Decays:
    """``A = -exp(A_log)`` of each layer that keeps the logarithm.

    A CUDA graph knows a tensor by its address, so they are computed anew in place when
    the weights change.
    """

    def __init__(self) -> None:
        """Know no layer yet."""
        self._known: WeakKeyDictionary[Any, torch.Tensor] = WeakKeyDictionary()

    def of(self, layer: Any) -> torch.Tensor:
        """``[heads]``, float32, of a layer whose weights are loaded."""
        known = self._known.get(layer)
        if known is None:
            known = self._known[layer] = _decay(layer.A_log)
        return known

    def refresh(self) -> None:
        """Note that the engine has loaded other weights."""
        for layer, known in self._known.items():
            known.copy_(_decay(layer.A_log))


def _decay(logarithm: torch.Tensor) -> torch.Tensor:
    # A tensor of inference mode could not be written outside it.
    with torch.inference_mode(False), torch.no_grad():
        return -logarithm.detach().reshape(-1).float().exp()
