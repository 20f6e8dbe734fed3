# SPDX-License-Identifier: Apache-2.0
"""Compile every Triton kernel for an H100/H200 on a machine without a GPU.

The interpreter runs kernels as plain Python and so accepts code that the compiler
refuses: a variable whose type changes in a branch or a loop, a None pointer. This
script runs the library's launches with a stand-in driver that compiles for sm_90
and launches nothing. Run by `test_compile.py` in a process of its own.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import triton.runtime
from hybrid_kernels.causal_conv1d import triton as conv
from hybrid_kernels.gated_delta_rule import triton as delta
from hybrid_kernels.kda import triton as kda
from hybrid_kernels.lightning_attention import triton as lightning
from hybrid_kernels.rg_lru import triton as lru
from hybrid_kernels.selective_scan import triton as scan
from hybrid_kernels.selective_scan.reference import Inputs
from hybrid_kernels.ssd import triton as ssd
from hybrid_kernels.state_copy import triton as copies
from triton.backends.compiler import GPUTarget

SHARED_MEMORY = 232448
"""Bytes one program may use on Hopper."""


class Driver:
    """As much of a driver as compiling asks for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def compile_only(self: Any, grid: object) -> Any:
    """In place of ``kernel[grid]``."""

    def launch(*args: Any, **options: Any) -> None:
        name = self.fn.__name__
        compiled = self.warmup(*args, grid=grid, **options)
        used = compiled.metadata.shared
        if used > SHARED_MEMORY:
            raise MemoryError(f"{name} wants {used} bytes of shared memory")
        print(name, used)

    return launch


def prefills(dtype: torch.dtype, width: int, depth: int, extra: bool) -> None:
    """Everything that takes packed sequences."""
    tokens, keys, values = 300, 2, 4

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(dtype)

    cu = torch.tensor([0, 100, 300], dtype=torch.int32)
    flags = torch.ones(2, dtype=torch.bool) if extra else None
    table = torch.zeros(2, 3, dtype=torch.int64) if extra else None
    pool = torch.randn(4, values, width, depth).to(dtype)
    rest = (cu, pool, torch.tensor([0, 1]), flags, table, extra)
    q, v = rand(tokens, keys, depth), rand(tokens, values, width)
    per_head, vector = torch.randn(tokens, values), torch.randn(values)
    wide, maybe = torch.randn(tokens, values, depth), vector if extra else None
    out = torch.empty_like(v)
    delta.prefill(q, q, v, per_head, per_head, *rest, 1.0, extra, out)
    kda.prefill(q, q, v, wide, per_head, *rest, 1.0, extra, out)
    lightning.prefill(q, q, v, vector, *rest, 1.0, out)
    gate = v if extra else None
    ssd.prefill(v, per_head, vector, q, q, maybe, gate, maybe, *rest, out)

    x, vector = rand(tokens, 300), torch.randn(300)
    maybe = vector if extra else None
    rest = (cu, torch.randn(4, 300).to(dtype), *rest[2:])
    lru.prefill(x, x, x, vector, *rest, torch.empty_like(x))
    b, a = rand(tokens, 16), torch.randn(300, 16)
    inputs = Inputs(x, x, a, b, b, maybe, x if extra else None, maybe)
    rest = (cu, torch.randn(4, 300, 16).to(dtype), *rest[2:])
    scan.prefill(inputs, *rest, torch.empty_like(x))
    rest = (cu, torch.randn(4, 300, 3), torch.tensor([0, 1]), flags)
    out = torch.empty_like(x)
    conv.prefill(x, rand(300, 4), maybe, *rest, "silu", table, 64, out)


def steps(dtype: torch.dtype, width: int, depth: int, extra: bool) -> None:
    """Everything that takes one or a few tokens per sequence."""
    lead, keys, values = (2, 3), 2, 4

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*lead, *shape).to(dtype)

    table = torch.zeros(lead, dtype=torch.int64)
    slots = torch.tensor([0, 1])
    tables = (slots, table, table if extra else None)
    pool = torch.randn(4, values, width, depth).to(dtype)
    q, v, per_head = rand(keys, depth), rand(values, width), rand(values)
    vector, out = torch.randn(values), torch.empty_like(v)
    maybe, gate = (vector, v) if extra else (None, None)
    fused = (maybe, maybe)
    delta.steps(q, q, v, per_head, per_head, *fused, pool, *tables, 1.0, True, out)
    wide = rand(values, depth)
    kda.steps(q, q, v, wide, per_head, pool, *tables, 1.0, True, out)
    lightning.steps(q, q, v, vector, pool, *tables, 1.0, out)
    more = (maybe, gate, maybe)
    ssd.steps(v, per_head, vector, q, q, *more, pool, *tables, out)

    x, vector = rand(300), torch.randn(300)
    maybe, gate = (vector, x) if extra else (None, None)
    out = torch.empty_like(x)
    lru.steps(x, x, x, vector, torch.randn(4, 300), *tables, out)
    inputs = Inputs(x, x, torch.randn(300, 16), rand(16), rand(16), maybe, gate, maybe)
    scan.steps(inputs, torch.randn(4, 300, 16), *tables, out)
    state = torch.randn(4, 300, 3)
    conv.step(x, torch.randn(300, 4), maybe, state, *tables, None, out)
    copies.copy(pool, slots, pool, slots, 0)
    copies.zero(pool, slots, 0)
    copies.promote(pool, table, slots, 0)
    copies.promote_swap(table, slots)


def main() -> None:
    """Compile for the shape named on the command line."""
    triton.runtime.driver.set_active(Driver())
    triton.runtime.JITFunction.__getitem__ = compile_only
    name, width, depth, extra = sys.argv[1:]
    shape = (getattr(torch, name), int(width), int(depth), extra == "extra")
    prefills(*shape)
    steps(*shape)


if __name__ == "__main__":
    main()
