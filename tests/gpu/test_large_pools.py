# SPDX-License-Identifier: Apache-2.0
"""Kernels on pools of 17 GiB: high slots and pages are treated as low ones are.

Offsets beyond 2**31 and 2**32 elements are reached, of 16 and of 32 bits.  Each
kernel runs on slots of the large pool and on slots of a small one that hold the same
states.  What lies between is NaN.  Engines' kernels are tested where they are
installed, ours always.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hybrid_kernels import causal_conv1d

from hybrid_plugin.device.arena import Arena
from tests.kernels.common import cu_seqlens, relative_error
from tests.kernels.layers import LARGE, Layer, names

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

DEVICE = "cuda"
SLOT_BYTES = 133 << 20
"""Of Falcon-H1-34B, about."""
SLOTS = 132
"""Slot 16 passes 2**31 bytes, 65 has 2**32 elements of 16 bits, 130 of 32 bits."""
WHERE = [1, 17, 33, 63, 66, 131]
TOLERANCE = 1e-6
"""Relative: other strides are other variants of a kernel."""


@pytest.fixture(scope="module")
def memory() -> Iterator[torch.Tensor]:
    yield torch.empty(SLOTS, SLOT_BYTES, dtype=torch.int8, device=DEVICE)
    torch.cuda.empty_cache()


@pytest.fixture
def room(memory: torch.Tensor) -> torch.Tensor:
    """`[slots, bytes]` of NaN in any type."""
    return memory.fill_(-1)


def far(
    room: torch.Tensor, item: tuple[int, ...], dtype: torch.dtype, turned: bool = False
) -> torch.Tensor:
    """`[slots, *item]` within the slots; with `turned` items lie transposed."""
    count = torch.Size(item).numel()
    start = 4096
    states = room[:, start : start + count * dtype.itemsize].view(dtype)
    if turned:
        return states.view(SLOTS, *item[::-1]).transpose(1, 2)
    return states.view(SLOTS, *item)


Run = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From a pool and slots (int32) to outputs; changes the states."""


def agree(large: torch.Tensor, run: Run) -> bool:
    """Whether a kernel does the same on high slots as on a small pool."""
    rows = len(WHERE)
    states = torch.randn(rows, *large.shape[1:], device=DEVICE).to(large.dtype) / 4
    small = torch.zeros(rows + 1, *large.shape[1:], device=DEVICE, dtype=large.dtype)
    small = torch.empty_strided(
        small.shape,
        (small[0].numel(), *large.stride()[1:]),
        dtype=large.dtype,
        device=DEVICE,
    ).copy_(small)
    small[1:], large[WHERE] = states, states
    expected = run(small, torch.arange(1, rows + 1, dtype=torch.int32, device=DEVICE))
    slots = torch.tensor(WHERE, dtype=torch.int32, device=DEVICE)
    got = run(large, slots)
    same = relative_error(got, expected) < TOLERANCE
    same &= relative_error(large[WHERE], small[1:]) < TOLERANCE
    return same and bool(large[[0, 2, 62, 64, 130]].float().isnan().all())


# ------------------------------------------------------------------------- ours

OURS = [LARGE[2], LARGE[6], LARGE[10], LARGE[14], *LARGE[16:]]
pools = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def pool_of(room: torch.Tensor, layer: Layer, dtype: torch.dtype) -> torch.Tensor:
    return far(room, layer.item, dtype, turned=layer.module is causal_conv1d)


@pools
@pytest.mark.parametrize("layer", OURS, ids=names(OURS))
def test_our_steps(room: torch.Tensor, layer: Layer, dtype: torch.dtype) -> None:
    inputs = layer.make(len(WHERE), dtype=dtype, device=DEVICE)

    def run(pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return layer.update(inputs, pool=pool, slots=slots)

    assert agree(pool_of(room, layer, dtype), run)


@pools
@pytest.mark.parametrize("layer", OURS, ids=names(OURS))
def test_our_prefills(room: torch.Tensor, layer: Layer, dtype: torch.dtype) -> None:
    lengths = [1, 63, 70, 64, 5, 130]
    inputs = layer.make(sum(lengths), dtype=dtype, device=DEVICE)
    sequences = cu_seqlens(lengths, DEVICE)

    def run(pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return layer.prefill(inputs, cu_seqlens=sequences, pool=pool, slots=slots)

    assert agree(pool_of(room, layer, dtype), run)


def test_our_copies_of_slots(room: torch.Tensor) -> None:
    arena, edge = Arena([room]), [0, SLOT_BYTES // 2, SLOT_BYTES - 1]
    for number, slot in enumerate(WHERE):
        room[slot] = number + 1
    targets = [slot - 1 for slot in WHERE]
    arena.copy(WHERE, targets)
    arena.zero(WHERE)
    for number, slot in enumerate(WHERE):
        assert bool((room[slot - 1] == number + 1).all())
        assert not room[slot].any()
    assert room[[2, 64, 67]][:, edge].eq(-1).all()


def test_our_copies_of_pages(room: torch.Tensor) -> None:
    """Pages of a megabyte and of a kilobyte, of one pool."""
    flat = room.view(-1)
    pages = flat.numel() // (1 << 20) // 2
    wide = flat[: pages << 20].view(pages, 1 << 20)
    narrow = flat[pages << 20 :][: pages << 10].view(pages, 1 << 10)
    arena, high = Arena([wide, narrow]), pages - 2
    for part in (wide, narrow):
        part[high], part[3] = 5, 6
    arena.copy([high, 3], [2, high + 1])
    arena.zero([high])
    for part in (wide, narrow):
        assert bool((part[2] == 5).all()) and bool((part[high + 1] == 6).all())
        assert not part[high].any() and bool((part[1] == -1).all())


# ----------------------------------------------------------------- the engines'


def imported(*modules: str) -> Any:
    """The first module that is installed; skips if none is."""
    for name in modules:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return pytest.skip(f"none of {', '.join(modules)} is installed")


SGLANG = "sglang.kernels.ops"
CHANNELS, WIDTH = 1024, 4


def convolution() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(len(WHERE), CHANNELS, device=DEVICE).bfloat16()
    weight = torch.randn(CHANNELS, WIDTH, device=DEVICE).bfloat16()
    return x, weight, torch.randn(CHANNELS, device=DEVICE).bfloat16()


def cuda_convolution(guarded: bool) -> Run:
    """SGLang's CUDA kernel for one token, behind our guard or not."""
    module = imported("sglang.srt.layers.attention.mamba.causal_conv1d")
    twin = imported(f"{SGLANG}.mamba.causal_conv1d_triton").causal_conv1d_update
    from hybrid_plugin.sglang.addressing import convolve_step

    x, weight, bias = convolution()
    cuda = module.causal_conv1d_update_kernel

    def run(pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        out = x.clone().unsqueeze(-1)
        rest = (pool, weight, bias, True, None, slots, -1)
        if guarded:
            convolve_step(cuda, twin, out, *rest)
        else:
            cuda(out, *rest)
        return out

    return run


def test_sglang_s_convolution_behind_our_guard(room: torch.Tensor) -> None:
    # The small pool takes the CUDA kernel: other sums, other bits.
    states = far(room, (CHANNELS, WIDTH - 1), torch.bfloat16)
    run = cuda_convolution(guarded=True)
    small = torch.randn(3, CHANNELS, WIDTH - 1, device=DEVICE).bfloat16()
    states[WHERE] = small[[1] * len(WHERE)]
    slots = torch.tensor(WHERE, dtype=torch.int32, device=DEVICE)
    got = run(states, slots)
    expected = run(small[[1] * len(WHERE)].clone(), torch.arange(6).int().to(DEVICE))
    assert relative_error(got, expected) < 1e-2
    assert relative_error(states[WHERE][..., :-1], small[[1] * 6][..., 1:]) == 0


def test_the_fault_behind_the_guard_is_still_there(room: torch.Tensor) -> None:
    """If this fails, SGLang mended its kernel: delete `_convolve_beyond_32_bits`."""
    states = far(room, (CHANNELS, WIDTH - 1), torch.bfloat16)
    assert not agree(states, cuda_convolution(guarded=False))


@pytest.mark.parametrize(
    "module",
    [
        f"{SGLANG}.mamba.causal_conv1d_triton",
        "vllm.model_executor.layers.mamba.ops.causal_conv1d",
    ],
)
def test_triton_s_convolutions(room: torch.Tensor, module: str) -> None:
    update = imported(module).causal_conv1d_update
    x, weight, bias = convolution()

    def run(pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = update(
            x.clone(), pool, weight, bias, "silu", conv_state_indices=slots
        )
        return out

    assert agree(far(room, (CHANNELS, WIDTH - 1), torch.bfloat16), run)


@pools
@pytest.mark.parametrize(
    "module",
    [
        f"{SGLANG}.mamba.triton_ops.mamba_ssm",
        "vllm.model_executor.layers.mamba.ops.mamba_ssm",
    ],
)
def test_mamba_2_steps(room: torch.Tensor, module: str, dtype: torch.dtype) -> None:
    update = imported(module).selective_state_update
    rows, heads, width, depth = len(WHERE), 8, 64, 128

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE)

    x, dt = randn(rows, heads, width), randn(rows, heads, width)
    rate = -randn(heads, width, depth).exp()
    b, c = randn(rows, 2, depth), randn(rows, 2, depth)
    skip, bias = randn(heads, width), randn(heads, width)

    def run(pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        out = torch.full_like(x, float("nan"))
        update(
            pool,
            x,
            dt,
            rate,
            b,
            c,
            D=skip,
            dt_bias=bias,
            dt_softplus=True,
            state_batch_indices=slots,
            out=out,
        )
        return out

    assert agree(far(room, (heads, width, depth), dtype), run)


@pytest.mark.parametrize(
    "module",
    [
        f"{SGLANG}.attention.fla.fused_recurrent",
        "vllm.third_party.flash_linear_attention.ops.fused_recurrent",
    ],
)
def test_gated_delta_steps(room: torch.Tensor, module: str) -> None:
    decode = imported(module).fused_recurrent_gated_delta_rule_packed_decode
    rows, heads, values, size = len(WHERE), 4, 8, 128
    width = (2 * heads + values) * size
    mixed = torch.randn(rows, width, device=DEVICE).bfloat16()
    gates = torch.randn(2, rows, values, device=DEVICE).bfloat16()
    constants = torch.randn(2, values, device=DEVICE)

    def run(pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        out = torch.full((rows, 1, values, size), float("nan"), device=DEVICE)
        out = out.bfloat16()
        decode(
            mixed,
            *gates,
            *constants,
            scale=size**-0.5,
            initial_state=pool,
            out=out,
            ssm_state_indices=slots,
            use_qk_l2norm_in_kernel=True,
        )
        return out

    assert agree(far(room, (values, size, size), torch.float32), run)


def test_vllm_s_lightning_steps(room: torch.Tensor) -> None:
    decode = imported(
        "vllm.model_executor.layers.lightning_attn"
    ).linear_decode_forward_triton
    rows, heads, size = len(WHERE), 4, 64
    q, k, v = torch.randn(3, rows, heads, 1, size, device=DEVICE)
    slope = torch.rand(heads, device=DEVICE)

    def run(pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = decode(q, k, v, pool, slope, slots)
        return out

    assert agree(far(room, (heads, size, size), torch.float32), run)


def test_vllm_writes_keys_and_values_to_high_pages(room: torch.Tensor) -> None:
    write = imported("vllm._custom_ops").reshape_and_cache_flash
    page, heads, size = 16, 8, 128
    wide = room.view(-1).view(torch.bfloat16)
    pages = wide.numel() // (2 * page * heads * size)
    cache = wide[: pages * 2 * page * heads * size].view(pages, 2, page, heads, size)
    high = [0, pages // 2, pages - 1]
    places = torch.tensor([p * page + 5 for p in high], device=DEVICE)
    key, value = torch.randn(2, 3, heads, size, device=DEVICE).bfloat16()
    one = torch.ones(1, device=DEVICE)
    write(key, value, cache[:, 0], cache[:, 1], places, "auto", one, one)
    for kept, written in ((cache[high, 0], key), (cache[high, 1], value)):
        assert torch.equal(kept[:, 5], written)
        assert kept[:, 4].isnan().all() and kept[:, 6].isnan().all()
