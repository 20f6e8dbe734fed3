# SPDX-License-Identifier: Apache-2.0
"""SGLang's own Triton kernels on slot-major states: on a GPU, or interpreted.

A script, because Triton's interpreter is chosen before Triton is imported, and for a
whole process: TRITON_INTERPRET=1, and no SGLANG_PLATFORM, whose kernels are others.
Exits with an error where a slot-major pool is not treated as a contiguous one is.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch
import triton.language as tl
from sglang.kernels.ops.attention.fla import utils
from sglang.kernels.ops.mamba.causal_conv1d_triton import causal_conv1d_fn
from sglang.srt.layers.attention.linear.kernels import gdn_triton
from triton.runtime.autotuner import Autotuner

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
SLOTS, KEY_HEADS, HEADS, WIDTH = 6, 1, 2, 64
CHANNELS, TAPS = 2 * KEY_HEADS * WIDTH + HEADS * WIDTH, 4
LENGTHS, USED = (70, 5, 2), (4, 1, 3)
FRESH = 1
"""The sequence without a prefix; its slot was cleared."""


def make_interpretable() -> None:
    """Have SGLang's modules run without a driver, and the autotuner not measure."""

    def unmeasured(*_: Any, **__: Any) -> list[float]:
        return [1.0, 1.0, 1.0]

    set_on(utils, "custom_device_ctx", lambda _: contextlib.nullcontext())
    set_on(Autotuner, "_bench", unmeasured)
    # The interpreter replaces what it finds in `tl` while a kernel runs.
    for name, module in list(sys.modules.items()):
        if name.startswith("sglang.kernels") and vars(module).get("exp") is tl.exp:
            set_on(module, "exp", lambda x: tl.exp(x))


def set_on(owner: Any, name: str, value: Any) -> None:
    """Replace an attribute for the rest of the process."""
    assert hasattr(owner, name)
    setattr(owner, name, value)


def pools(*shape: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Equal states `[SLOTS, *shape]`, contiguous and slot-major; NaN where unused."""
    size = torch.Size(shape).numel()
    states = torch.full((SLOTS, *shape), torch.nan, dtype=dtype, device=DEVICE)
    for sequence, slot in enumerate(USED):
        kept = torch.randn(shape, device=DEVICE).to(dtype)
        states[slot] = 0 if sequence == FRESH else kept
    rows = torch.full((SLOTS, 3 * size), torch.nan, dtype=dtype, device=DEVICE)
    strided = rows[:, size : 2 * size].view(SLOTS, *shape)
    strided.copy_(states)
    assert not strided.is_contiguous() and strided[0].is_contiguous()
    return states, strided


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.nan_to_num(1e4), other.nan_to_num(1e4))


def check_pool(before: torch.Tensor, states: torch.Tensor, strided: Any) -> None:
    """Both pools are equal, advanced where used, and as they were elsewhere."""
    assert same(states, strided), "the pools differ"
    beside = strided._base.isnan().sum(1)[list(USED)]
    assert bool((beside == 2 * states[0].numel()).all())
    for slot in range(SLOTS):
        assert same(before[slot], strided[slot]) == (slot not in USED), slot
        assert bool(strided[slot].isnan().any()) == (slot not in USED), slot


def inputs(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(torch.float16)


def bounds() -> torch.Tensor:
    lengths = torch.tensor((0, *LENGTHS), device=DEVICE)
    return lengths.cumsum(0).to(torch.int32)


def used() -> torch.Tensor:
    return torch.tensor(USED, dtype=torch.int32, device=DEVICE)


def check_delta_rule() -> None:
    """The prefill of `TritonGDNKernel`, under the plugin's hooks."""
    tokens = sum(LENGTHS)
    q, k = inputs(1, tokens, KEY_HEADS, WIDTH), inputs(1, tokens, KEY_HEADS, WIDTH)
    v = inputs(1, tokens, HEADS, WIDTH)
    g = -torch.rand(1, tokens, HEADS, device=DEVICE)
    beta = torch.rand(1, tokens, HEADS, device=DEVICE)

    def run(states: torch.Tensor) -> Any:
        return gdn_triton.TritonGDNKernel().extend(
            q,
            k,
            v,
            g,
            beta,
            ssm_states=states,
            cache_indices=used(),
            query_start_loc=bounds(),
        )

    states, strided = pools(HEADS, WIDTH, WIDTH, dtype=torch.float32)
    before = states.clone()
    expected, _, chunks = run(states)
    out, _, strided_chunks = run(strided)
    assert torch.equal(out, expected) and not bool(out.isnan().any())
    assert torch.equal(chunks, strided_chunks)
    check_pool(before, states, strided)
    try:
        run(strided.transpose(2, 3))
    except RuntimeError as error:
        assert "are not served by" in str(error)
    else:
        raise AssertionError("a state that is not contiguous was taken")


def check_convolution() -> None:
    """The kernel of `GDNAttnBackend._convolve_prefill` for tokens in rows."""
    x, weight = inputs(sum(LENGTHS), CHANNELS).t(), inputs(CHANNELS, TAPS)
    known = torch.tensor([n != FRESH for n in range(len(USED))], device=DEVICE)

    def run(states: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = causal_conv1d_fn(
            x,
            weight,
            None,
            conv_states=states,
            has_initial_state=known,
            cache_indices=used(),
            query_start_loc=bounds(),
            seq_lens_cpu=list(LENGTHS),
        )
        return out

    states, strided = pools(CHANNELS, TAPS - 1, dtype=torch.float16)
    before = states.clone()
    expected, out = run(states), run(strided)
    assert torch.equal(out, expected) and not bool(out.isnan().any())
    check_pool(before, states, strided)


def set_hooks() -> None:
    """The plugin's hooks for elastic pools, and no other."""
    from hybrid_plugin.sglang import patches
    from hybrid_plugin.sglang.pool_memory import PoolMemory

    patches._leave_states_in_place(PoolMemory())
    patches._apply()


def main() -> None:
    torch.manual_seed(0)
    module = gdn_triton.chunk_gated_delta_rule.__module__
    assert module.startswith("sglang."), module
    if "--without-hooks" not in sys.argv:
        set_hooks()
    if not ON_GPU:
        make_interpretable()
    check_convolution()
    check_delta_rule()


if __name__ == "__main__":
    main()
