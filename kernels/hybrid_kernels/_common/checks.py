# SPDX-License-Identifier: Apache-2.0
"""Argument checks and backend choice. Nothing here touches device memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def on_gpu(tensor: torch.Tensor) -> bool:
    """Whether Triton should run this tensor's operation."""
    return tensor.device.type != "cpu"


def require(condition: bool, message: str) -> None:
    """Refuse a call whose arguments do not fit together.

    Raises:
        ValueError: with `message`, if `condition` is false.
    """
    if not condition:
        raise ValueError(message)


def check_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Require an exact shape.

    Raises:
        ValueError: naming the tensor, its shape and the expected one.
    """
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {shape}")


def check_index(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Require an int32 or int64 tensor of an exact shape.

    Raises:
        ValueError: if the shape or the type differs.
    """
    check_shape(name, tensor, shape)
    if str(tensor.dtype) not in ("torch.int32", "torch.int64"):
        raise ValueError(f"{name} is {tensor.dtype}, expected int32 or int64")


def check_flags(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Require a bool tensor of an exact shape.

    Raises:
        ValueError: if the shape or the type differs.
    """
    check_shape(name, tensor, shape)
    if str(tensor.dtype) != "torch.bool":
        raise ValueError(f"{name} is {tensor.dtype}, expected bool")


def check_last_contiguous(name: str, tensor: torch.Tensor) -> None:
    """Require stride 1 along the last dimension.

    Raises:
        ValueError: naming the tensor and its strides.
    """
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} has strides {tensor.stride()}; the last must be 1")
