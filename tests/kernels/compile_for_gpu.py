# SPDX-License-Identifier: Apache-2.0
"""Compile every Triton kernel for an H100/H200 on a machine without a GPU.

The interpreter runs kernels as plain Python and so accepts code that the compiler
refuses: a variable whose type changes in a branch or a loop, a None pointer. This
script makes the library's calls with a stand-in driver that compiles for sm_90 and
launches nothing. Run by `test_compile.py` in a process of its own.

It also reads the machine code for a bug of ptxas 12.8, which Triton 3.6 carries: the
address of a matrix operand in shared memory may be taken from a uniform register
that nothing has written. Seen in the output kernel with tiles 32 columns wide, whose
results were then wrong on an H200; which tile sizes are hit cannot be foreseen.
Kernels without such an operand are not read: starting the disassembler takes longer
than compiling most of them.

And all variants of a layer's step must sum in one order, or `verify` and `commit` would
not give the bits of `update`: it compares the layouts of what they reduce.  Nor may the
compiler join a product to a sum.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import layers
import torch
import triton.backends.nvidia
import triton.runtime
from hybrid_kernels import (
    gated_delta_rule,
    gated_norm,
    part_norm,
    replay,
    state_copy,
    stops,
)
from hybrid_kernels._common import operation
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


DISASSEMBLER = Path(triton.backends.nvidia.__file__).parent / "bin" / "nvdisasm"
INSTRUCTION = re.compile(r"\*/\s+(?:@!?U?P\w+ )?([A-Z0-9_.]+)\s*(.*?);")


def unwritten_registers(machine_code: bytes) -> set[int]:
    """Uniform registers that are read as numbers and never written."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(machine_code)
        file.flush()
        command = [str(DISASSEMBLER), "-c", "-ndf", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    written, read = set[int](), set[int]()
    for name, operands in INSTRUCTION.findall(done.stdout):
        # A descriptor names four registers, of which not all need mean anything.
        plain = re.sub(r"gdesc\[UR\d+\]", "", operands)
        registers = [int(number) for number in re.findall(r"\bUR(\d+)\b", plain)]
        if re.match(r"UR\d", operands) and re.match(r"U|[RS]2UR|REDUX|VOTE", name):
            wide = 4 if ".128" in name else 2 if re.search(r"64|WIDE", name) else 1
            written.update(range(registers[0], registers[0] + wide))
            registers = registers[1:]
        read.update(registers)
    return read - written


def summed(code: str) -> frozenset[str]:
    """What a kernel reduces: element types, shapes, and which thread has which."""
    layouts = dict(re.findall(r"^(#\w+) = (.+)$", code, re.MULTILINE))
    types = re.findall(r"^\s*\}\) : \((tensor<.+?>)\) -> ", code, re.MULTILINE)
    return frozenset(
        re.sub(r"#\w+", lambda found: layouts[found.group()], each) for each in types
    )


SUMS: set[frozenset[str]] = set()
"""Of the step kernels of the layer at hand."""

SAME_BITS = ("hybrid_kernels._common.linear_step", "hybrid_kernels.replay.triton")
"""Whose kernels must round alike."""


def compile_only(self: Any, grid: object) -> Any:
    """In place of ``kernel[grid]``."""

    def launch(*args: Any, **options: Any) -> None:
        name = self.fn.__name__
        compiled = self.warmup(*args, grid=grid, **options)
        used = compiled.metadata.shared
        if used > SHARED_MEMORY:
            raise MemoryError(f"{name} wants {used} bytes of shared memory")
        if DISASSEMBLER.exists() and "wgmma" in compiled.asm["ptx"]:
            print(name, "read", flush=True)
            missing = unwritten_registers(compiled.asm["cubin"])
            assert not missing, f"{name} reads uniform registers {missing} unwritten"
        if self.fn.__module__ in SAME_BITS:
            fused = compiled.metadata.enable_fp_fusion
            assert not fused, f"{name} may join products and sums as it likes"
        if name == "_step_kernel":
            SUMS.add(summed(compiled.asm["ttgir"]))
        print(name, used, flush=True)

    return launch


def prefill(layer: layers.Layer, dtype: torch.dtype, extra: bool) -> None:
    """Two sequences; with every table there is, or none."""
    tables: dict[str, torch.Tensor] = {}
    if extra:
        tables["has_initial"] = torch.ones(2, dtype=torch.bool)
        tables["boundary_slots"] = torch.zeros(2, 3, dtype=torch.int64)
        tables["offsets"] = torch.zeros(2, dtype=torch.int32)
    layer.prefill(
        layer.make(300, dtype=dtype),
        **tables,
        **(layer.rounding if extra else {}),
        cu_seqlens=torch.tensor([0, 100, 300], dtype=torch.int32),
        # States are wider than the rest, mostly; that takes more shared memory.
        pool=layer.states(4, torch.float32 if extra else dtype),
        slots=torch.tensor([0, 1]),
    )


def steps(layer: layers.Layer, dtype: torch.dtype, extra: bool) -> None:
    """A tree of drafts, or one token each."""
    pool, slots = layer.states(4, dtype), torch.tensor([0, 1])
    table = torch.zeros(2, 3, dtype=torch.int64)
    if extra:
        rows = layer.make(2, 3, dtype=dtype)
        layer.verify(rows, pool=pool, slots=slots, draft_slots=table, parents=table)
    else:
        layer.update(layer.make(2, dtype=dtype), pool=pool, slots=slots)
    if layer.module not in (layers.rg_lru, layers.selective_scan):
        packed(layer, dtype, extra)


def packed(layer: layers.Layer, dtype: torch.dtype, extra: bool) -> None:
    """Packed drafts with a record, and their commit; trees or chains."""
    pool, slots = layer.states(4, dtype), torch.tensor([0, 1])
    kept = layer.record(pool, 2, 3)
    parents = torch.zeros(2, 3, dtype=torch.int32) if extra else None
    layer.verify(
        layer.make(5, dtype=dtype),
        pool=pool,
        slots=slots,
        cu_seqlens=torch.tensor([0, 2, 5]),
        record=kept.record,
        parents=parents,
    )
    states = [kept] if isinstance(kept, replay.States) else []
    windows = [kept] if isinstance(kept, replay.Windows) else []
    replay.commit(replay.Layers(states, windows), slots, slots, parents=parents)


def factors(dtype: torch.dtype, extra: bool) -> None:
    """What a layer gives to kernels that know no gates."""
    tokens = layers.delta(2, 4, 128, 128, fused=extra).make(70, dtype=dtype)
    gated_delta_rule.factors(**tokens, rows=torch.arange(70), use_qk_l2norm=extra)


def copies() -> None:
    """All operations on whole slots."""
    pool, slots = torch.zeros(4, 300), torch.tensor([0, 1])
    state_copy.fork(pool, slots, slots)
    state_copy.gather(pool[:2], pool, slots)
    state_copy.scatter(pool, slots, pool[:2])
    state_copy.zero(pool, slots)
    state_copy.promote(pool, torch.zeros(2, 3, dtype=torch.int64), slots)
    for parts in (
        state_copy.Parts([pool, torch.zeros(4, 20, dtype=torch.int8)[:, :16]]),
        state_copy.Parts([pool, torch.zeros(4, 7, dtype=torch.int8)]),
    ):
        state_copy.fork_parts(parts, slots, slots)
        state_copy.zero_parts(parts, slots)
        twins = [part.clone() for part in parts.tensors]
        pair = state_copy.PartsPair(parts.tensors, twins)
        state_copy.transfer_parts(pair, slots, slots)
    state_copy.promote_swap(torch.zeros(2, 3, dtype=torch.int64), slots)


def cuts(extra: bool) -> None:
    """Ends of requests among accepted drafts."""
    kind = torch.int32 if extra else torch.int64
    one, sampled = torch.zeros(1, dtype=kind), torch.zeros(1, 4, dtype=torch.int64)
    others = sampled > 0 if extra else None
    stops.cut(sampled, one, one, one, stops.Ends(sampled, one, one, others))


def norms(dtype: torch.dtype, width: int, extra: bool) -> None:
    """Behind a layer, gated by columns of a wider tensor."""
    x, rows = torch.zeros(5, 6, width, dtype=dtype), torch.zeros(5, 9 * width)
    gate = rows.to(dtype)[:, 3 * width :].unflatten(-1, (6, width))
    weight = torch.ones(width, dtype=torch.float32 if extra else dtype)
    activation = "sigmoid" if extra else "silu"
    gated_norm.rms_norm(x, gate, weight, 1e-6, activation=activation, out=x)
    gated_norm.norm_of_gated(x, gate, weight.expand(6, width), 1e-6, out=x)
    parts = torch.split(weight, [width - 16, 8, 8])
    part_norm.rms_norms(rows.to(dtype)[:, width:][:, :width], parts, 1e-6)


def main() -> None:
    """Compile for the shape named on the command line."""
    triton.runtime.driver.set_active(Driver())
    triton.runtime.JITFunction.__getitem__ = compile_only
    for module in (operation, gated_norm, part_norm, replay, state_copy, stops):
        module.on_gpu = lambda tensor: True  # type: ignore[attr-defined]
    if not DISASSEMBLER.exists():
        print("no disassembler")
    name, width, depth, mode = sys.argv[1:]
    shape, extra = (int(depth), int(width)), mode == "extra"
    for layer in (
        layers.delta(2, 4, *shape, fused=extra),
        layers.kimi(2, 4, *shape, fused=extra),
        layers.mamba2(2, 4, *shape),
        layers.lightning(2, 4, *shape),
        layers.griffin(300),
        layers.mamba1(300, 16),
        layers.convolution(300, 4),
    ):
        dtype = getattr(torch, name)
        prefill(layer, dtype, extra)
        SUMS.clear()
        steps(layer, dtype, extra)
        assert len(SUMS) == 1, f"the steps of {layer.name} sum in {SUMS}"
        known = all("blocked" in each for each in next(iter(SUMS)))
        assert known, f"{layer.name} sums in {SUMS}, which this script cannot read"
        print(layer.name, len(next(iter(SUMS))), "sums", flush=True)
    factors(getattr(torch, name), extra)
    norms(getattr(torch, name), shape[0], extra)
    copies()
    cuts(extra)


if __name__ == "__main__":
    main()
