# SPDX-License-Identifier: Apache-2.0
"""How large the blocks are that elastic pools map and unmap; needs no PyTorch."""

from __future__ import annotations

from hybrid_plugin.core.memory.layout import TooLittleMemoryError

_CUDA_BLOCK, _LARGEST_CUDA_BLOCK = 2 << 20, 16 << 20
"""The least is what NVIDIA's drivers map; `CudaArena` checks it."""
_CUDA_BLOCKS = 1024
"""GPU memory comes in about so many blocks: to move one takes the driver 0.1 ms,
whatever its size (`benchmarks/memory_moves.py`), so all of it moves in 0.1 s."""
_HOST_BLOCK, _LARGEST_HOST_BLOCK = 16 << 10, 2 << 20
_HOST_BLOCKS = 8192
"""Host memory comes in about so many blocks: each may cost the kernel a record."""


def block_bytes(bound: int, device_type: str) -> int:
    """Bytes that a device's memory is mapped in.

    Args:
        bound: bytes that the pools of a rank may take, or a little more or less;
            equal on every rank, as blocks must be: what each finds free is not.
        device_type: "cpu" or "cuda".
    """
    if device_type == "cpu":
        size, most, largest = _HOST_BLOCK, _HOST_BLOCKS, _LARGEST_HOST_BLOCK
    else:
        size, most, largest = _CUDA_BLOCK, _CUDA_BLOCKS, _LARGEST_CUDA_BLOCK
    while size < largest and size * most < bound:
        size *= 2
    return size


def pool_budget(available: int, block_bytes: int) -> int:
    """Bytes of `available` ones that pools can share: whole blocks, less one.

    The one is mapped behind the holes of the address ranges.

    Raises:
        TooLittleMemoryError: if nothing is left.
    """
    blocks = available // block_bytes - 1
    if blocks < 1:
        raise TooLittleMemoryError(
            f"{available} bytes are less than two blocks of {block_bytes} bytes"
        )
    return blocks * block_bytes
