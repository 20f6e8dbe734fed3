# SPDX-License-Identifier: Apache-2.0
"""Compile prefills whose tokens lie behind those of decodes, without a GPU.

Such tokens begin at addresses that are no multiples of 16 bytes, for which Triton
compiles a kernel anew.  What is summed and multiplied must be laid out as for tokens
that begin a pass, or a prompt's bits depend on how many sequences decode beside it.
Run by `test_compile.py`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import compile_for_gpu
import layers
import torch
import triton.knobs
import triton.runtime
from hybrid_kernels._common import operation
from hybrid_kernels.gated_delta_rule import triton as delta_rule

TOKENS = 150
PRODUCT = re.compile(r"(?:tt\.dot|ttng\.warp_group_dot) .+ -> (tensor<.+>)")
SUM = re.compile(r"^\s*\}\) : \((tensor<.+?>)\) -> ")

Found = list[tuple[str, tuple[str, ...]]]
FOUND: Found = []
"""Kernels and what they compute with, in the order of their launches."""


def arithmetic(code: str) -> tuple[str, ...]:
    """Results of products, and what is summed: types, and which thread has what."""
    layouts = dict(re.findall(r"^(#\w+) = (.+)$", code, re.MULTILINE))
    lines = code.splitlines()
    found = [
        each for line in lines if (each := PRODUCT.search(line) or SUM.match(line))
    ]
    return tuple(
        re.sub(r"#\w+", lambda name: layouts.get(name.group(), ""), each.group(1))
        for each in found
    )


def up_to_layouts(*given: Any) -> tuple[str, str] | None:
    """Have Triton compile no further than what is compared, half of which is the rest.

    It calls this with a backend and its stages, and without anything for the key of its
    cache.
    """
    if not given:
        return "up to layouts", ""
    stages = given[1]
    for later in ("llir", "ptx"):
        del stages[later]

    def nothing(source: object, metadata: dict[str, Any]) -> bytes:
        metadata.update(name="", shared=0)
        return b""

    stages["cubin"] = nothing
    return None


def note(self: Any, grid: object) -> Any:
    """In place of ``kernel[grid]``."""

    def launch(*args: Any, **options: Any) -> None:
        compiled = self.warmup(*args, grid=grid, **options)
        FOUND.append((self.fn.__name__, arithmetic(compiled.asm["ttgir"])))

    return launch


def compiled(layer: layers.Layer, first: int) -> Found:
    """What a prefill behind `first` tokens is made of."""
    FOUND.clear()
    rows = layer.rows()

    def behind(tokens: torch.Tensor) -> torch.Tensor:
        # Rows of odd length, as those of several operands side by side may be.
        width = tokens[0].numel()
        wide = tokens.new_zeros(first + TOKENS, width + 1)
        return wide[first:, :width].unflatten(1, tokens.shape[1:])

    inputs = layer.make(TOKENS, dtype=torch.bfloat16)
    layer.prefill(
        {name: behind(x) if name in rows else x for name, x in inputs.items()},
        **layer.rounding,
        cu_seqlens=torch.tensor([0, 50, TOKENS], dtype=torch.int32),
        pool=layer.states(4, torch.bfloat16),
        slots=torch.zeros(2, dtype=torch.int32),
        has_initial=torch.ones(2, dtype=torch.bool),
        offsets=torch.zeros(2, dtype=torch.int32),
        boundary_slots=torch.zeros(2, 3, dtype=torch.int32),
    )
    return list(FOUND)


def main() -> None:
    """Compare prefills behind none, one and two decodes."""
    triton.runtime.driver.set_active(compile_for_gpu.Driver())
    triton.runtime.JITFunction.__getitem__ = note
    triton.knobs.runtime.add_stages_inspection_hook = up_to_layouts
    operation.on_gpu = lambda tensor: True  # type: ignore[attr-defined]
    for layer in (
        layers.delta(2, 4, 64, 64, fused=True),
        layers.kimi(2, 4, 64, 64, fused=True),
        layers.mamba2(2, 4, 64, 64),
        layers.lightning(2, 4, 64, 64),
        layers.convolution(300, 4),
    ):
        alone = compiled(layer, 0)
        sums = sum(len(each) for _, each in alone)
        assert sums, f"nothing of {layer.name} is recognised"
        for first in (1, 2):
            beside = compiled(layer, first)
            assert beside == alone, f"{layer.name} behind {first} decodes"
        print(layer.name, sums, flush=True)
    layer = layers.delta(2, 4, 64, 64, fused=True)
    alone, tunings = compiled(layer, 0), delta_rule.CORRECT
    delta_rule.CORRECT = replace(tunings, narrow=replace(tunings.narrow, warps=8))
    assert compiled(layer, 0) != alone, "a kernel that sums otherwise is not seen"


if __name__ == "__main__":
    main()
