# SPDX-License-Identifier: Apache-2.0
"""A PyTorch that pins no tensor, for modules of SGLang that pin whatever is said.

Other modules see PyTorch as it is: `torch.device`, as a context, knows the functions
that create tensors by their identity, and would not put on its device what a
replacement creates.  (transformers asks `torch.tensor([]).device` whether weights are
to be loaded; with a replacement it leaves rotary frequencies uninitialised.)
"""

from __future__ import annotations

from typing import Any

import torch


class WithoutPinning:
    """PyTorch, but that `tensor` and `zeros` pin nothing."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def tensor(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        """Like PyTorch's."""
        return torch.tensor(*args, **kwargs)

    @staticmethod
    def zeros(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        """Like PyTorch's."""
        return torch.zeros(*args, **kwargs)
