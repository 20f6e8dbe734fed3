# SPDX-License-Identifier: Apache-2.0
"""Records of the layers' weights, made once and kept up to date."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch

W = TypeVar("W")


class LayerWeights(Generic[W]):
    """What `hybrid_plugin.mixers` needs of each layer.

    A CUDA graph knows the tensors of a record by their addresses, so what is computed
    from weights is computed anew in place when the weights change.
    """

    def __init__(
        self,
        derive: Callable[[Any], torch.Tensor],
        record: Callable[[Any, torch.Tensor], W],
    ) -> None:
        """Know no layer yet.

        Args:
            derive: what is computed from a layer's weights.
            record: a layer's record, given that.
        """
        self._derive = derive
        self._record = record
        self._known: WeakKeyDictionary[Any, tuple[torch.Tensor, W]]
        self._known = WeakKeyDictionary()

    def of(self, layer: Any) -> W:
        """The record of a layer, whose weights are loaded."""
        known = self._known.get(layer)
        if known is None:
            derived = self._derived(layer)
            known = self._known[layer] = (derived, self._record(layer, derived))
        return known[1]

    def refresh(self) -> None:
        """Note that the engine has loaded other weights."""
        for layer, (derived, _) in list(self._known.items()):
            derived.copy_(self._derived(layer))
            self._known[layer] = (derived, self._record(layer, derived))

    def _derived(self, layer: Any) -> torch.Tensor:
        # A tensor of inference mode could not be written outside it.
        with torch.inference_mode(False), torch.no_grad():
            return self._derive(layer)


def decay(logarithm: torch.Tensor) -> torch.Tensor:
    """``[heads]``, float32: the rate `A` of a layer, given the checkpoint's `A_log`."""
    return -logarithm.detach().reshape(-1).float().exp()
