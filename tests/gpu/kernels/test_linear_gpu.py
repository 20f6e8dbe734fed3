# SPDX-License-Identifier: Apache-2.0
"""Delta-rule and Mamba-2 kernels on a GPU: accuracy, capture, batch invariance."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hybrid_kernels import gated_delta_rule, kda, lightning_attention, ssd
from hybrid_kernels._common import linear
from torch.nn import functional

# Relative error in the 2-norm against float64 on the same (rounded) inputs.
BOUNDS = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
STATE_BOUNDS = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


@dataclass(frozen=True)
class Case:
    """One operation at one head shape."""

    make: Callable[..., dict[str, torch.Tensor]]
    prefill: Callable[..., torch.Tensor]
    update: Callable[..., torch.Tensor]
    verify: Callable[..., torch.Tensor]
    exact: Callable[[dict[str, torch.Tensor]], linear.Tokens]
    heads: int
    width: int
    depth: int

    def pool(self, slots: int) -> torch.Tensor:
        shape = (slots, self.heads, self.width, self.depth)
        return torch.randn(shape, device="cuda") * self.depth**-0.5


def delta_inputs(
    rows: tuple[int, ...], dtype: torch.dtype, width: int, depth: int
) -> dict[str, torch.Tensor]:
    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*rows, *shape, device="cuda")

    return {
        "q": functional.normalize(randn(2, depth), dim=-1).to(dtype),
        "k": functional.normalize(randn(2, depth), dim=-1).to(dtype),
        "v": randn(4, width).to(dtype),
        "g": -functional.softplus(randn(4) - 3),
        "beta": randn(4).sigmoid(),
    }


def kda_inputs(
    rows: tuple[int, ...], dtype: torch.dtype, width: int, depth: int
) -> dict[str, torch.Tensor]:
    inputs = delta_inputs(rows, dtype, width, depth)
    g = torch.randn(*rows, 4, depth, device="cuda") - 3
    return {**inputs, "g": -functional.softplus(g)}


def kda_exact(inputs: dict[str, torch.Tensor]) -> linear.Tokens:
    return delta_exact(inputs)


def lightning_inputs(
    rows: tuple[int, ...], dtype: torch.dtype, width: int, depth: int
) -> dict[str, torch.Tensor]:
    inputs = delta_inputs(rows, dtype, width, depth)
    return {name: inputs[name] for name in "qkv"}


def lightning_exact(inputs: dict[str, torch.Tensor]) -> linear.Tokens:
    wide = {name: x.double() for name, x in inputs.items()}
    q, k = (wide[n].repeat_interleave(2, -2) for n in "qk")
    g = (RATE * 0.1).to(q).expand(wide["v"].shape[:-1])[..., None]
    return linear.Tokens(q, k, wide["v"], g, None)


def delta_exact(inputs: dict[str, torch.Tensor]) -> linear.Tokens:
    wide = {name: x.double() for name, x in inputs.items()}
    q, k = (wide[n].repeat_interleave(2, -2) for n in "qk")
    g = wide["g"][..., None] if wide["g"].ndim == wide["beta"].ndim else wide["g"]
    q = q * k.shape[-1] ** -0.5
    return linear.Tokens(q, k, wide["v"], g, wide["beta"][..., None])


def ssd_inputs(
    rows: tuple[int, ...], dtype: torch.dtype, width: int, depth: int
) -> dict[str, torch.Tensor]:
    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*rows, *shape, device="cuda")

    return {
        "x": randn(4, width).to(dtype),
        "dt": randn(4) - 3,
        "b": (randn(2, depth) * depth**-0.5).to(dtype),
        "c": randn(2, depth).to(dtype),
    }


RATE = torch.tensor([-0.5, -1.0, -2.0, -4.0])


def ssd_exact(inputs: dict[str, torch.Tensor]) -> linear.Tokens:
    wide = {name: x.double() for name, x in inputs.items()}
    b, c = (wide[n].repeat_interleave(2, -2) for n in "bc")
    time = functional.softplus(wide["dt"])[..., None]
    return linear.Tokens(c, b, wide["x"] * time, time * RATE.to(time)[:, None], None)


@functools.cache
def on_device(scale: float) -> torch.Tensor:
    """`RATE` on the GPU; made once, since a graph may not copy from the host."""
    return RATE.cuda() * scale


def with_rate(call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda **inputs: call(a=on_device(1.0), **inputs)


def with_decay(call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda **inputs: call(decay=on_device(0.1), **inputs)


def same(call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return call


OPERATIONS: list[tuple[Any, ...]] = [
    ("delta", gated_delta_rule, delta_inputs, delta_exact, same),
    ("ssd", ssd, ssd_inputs, ssd_exact, with_rate),
    ("kda", kda, kda_inputs, kda_exact, same),
    ("lightning", lightning_attention, lightning_inputs, lightning_exact, with_decay),
]


def cases() -> Iterator[tuple[str, Case]]:
    for width, depth in ((128, 128), (60, 64), (64, 256)):
        for name, module, make, exact, wrap in OPERATIONS:
            case = Case(
                lambda rows, dtype, f=make, w=width, d=depth: f(rows, dtype, w, d),
                wrap(module.prefill),
                wrap(module.update),
                wrap(module.verify),
                exact,
                4,
                width,
                depth,
            )
            yield f"{name}-{width}x{depth}", case


IDS, CASES = zip(*cases(), strict=True)


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    expected = expected.double()
    return float((actual.double() - expected).norm() / expected.norm())


def exact_run(
    tokens: linear.Tokens, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence in float64."""
    outs, state = [], state.double()
    for start in range(0, len(tokens.v), 64):
        out, state = linear.chunk(tokens[start : start + 64], state)
        outs.append(out)
    return torch.cat(outs), state


def nan_like(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.full_like(inputs["v" if "v" in inputs else "x"], float("nan"))


@pytest.mark.parametrize("case", CASES, ids=IDS)
@pytest.mark.parametrize("dtype", list(BOUNDS), ids=str)
def test_prefill_is_close_to_float64(case: Case, dtype: torch.dtype) -> None:
    lengths = [1, 63, 257, 0, 1000]
    cu = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    inputs = case.make((sum(lengths),), dtype)
    pool = case.pool(8)
    before = pool.clone()
    slots = torch.tensor([4, 0, 2, 1, 3], device="cuda")
    table = torch.full((5, 15), -1, device="cuda")
    table[4, 14] = 6
    out = case.prefill(
        **inputs,
        cu_seqlens=cu,
        pool=pool,
        slots=slots,
        boundary_slots=table,
        out=nan_like(inputs),
    )
    start = 0
    for row, length in enumerate(lengths):
        mine = {name: x[start : start + length] for name, x in inputs.items()}
        slot = slots[row]
        if length:
            expected, state = exact_run(case.exact(mine), before[slot])
            got = out[start : start + length]
            assert error(got, expected) < BOUNDS[dtype]
            assert error(pool[slot], state) < STATE_BOUNDS[dtype]
        else:
            assert torch.equal(pool[slot], before[slot])
        if length == 1000:
            mine = {name: x[:960] for name, x in mine.items()}
            state = exact_run(case.exact(mine), before[slot])[1]
            assert error(pool[6], state) < STATE_BOUNDS[dtype]
        start += length


@pytest.mark.parametrize("case", CASES, ids=IDS)
@pytest.mark.parametrize("dtype", list(BOUNDS), ids=str)
def test_update_is_close_to_float64(case: Case, dtype: torch.dtype) -> None:
    inputs = case.make((33,), dtype)
    pool = case.pool(40)
    slots = torch.randperm(40, device="cuda")[:33]
    slots[5] = -1
    before = pool.clone()
    out = case.update(**inputs, pool=pool, slots=slots, out=nan_like(inputs))
    start = before[slots.clamp(min=0)].double()
    start[5] = 0
    expected, state = linear.step(case.exact(inputs), start)
    # The state is float32 and the arithmetic too: only the output is rounded.
    assert error(out, expected) < min(BOUNDS[dtype], 4e-3)
    keep = slots >= 0
    assert error(pool[slots[keep]], state[keep]) < 1e-6


@pytest.mark.parametrize("case", CASES[:4], ids=IDS[:4])
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_verify_gives_the_bits_of_replayed_updates(case: Case, tree: bool) -> None:
    inputs = case.make((3, 5), torch.bfloat16)
    parents = torch.tensor([[-1, 0, 0, 1, -1]], device="cuda").expand(3, 5)
    pool = case.pool(20).bfloat16()
    before = pool.clone()
    slots = torch.arange(3, device="cuda")
    drafts = torch.arange(3, 18, device="cuda").view(3, 5)
    out = case.verify(
        **inputs,
        pool=pool,
        slots=slots,
        draft_slots=drafts,
        parents=parents.contiguous() if tree else None,
        out=nan_like(inputs),
    )
    for draft in range(5):
        path, node = [], draft
        while node >= 0:
            path.insert(0, node)
            node = int(parents[0, node]) if tree else node - 1
        states = before[:3].clone()
        for node in path:
            step = {name: x[:, node] for name, x in inputs.items()}
            y = case.update(**step, pool=states, slots=slots)
        assert torch.equal(out[:, draft], y)
        assert torch.equal(pool[drafts[:, draft]], states)


@pytest.mark.parametrize("case", CASES[:4], ids=IDS[:4])
def test_captured_update_replays_with_new_slots(case: Case) -> None:
    inputs = case.make((8,), torch.bfloat16)
    pool, out = case.pool(12), nan_like(inputs)
    slots = torch.full((8,), -1, device="cuda")
    case.update(**inputs, pool=pool, slots=slots, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.update(**inputs, pool=pool, slots=slots, out=out)
    slots.copy_(torch.tensor([3, 7, -1, 0, 1, 2, 11, 10]))
    expected = pool.clone()
    wanted = case.update(**inputs, pool=expected, slots=slots)
    graph.replay()
    assert torch.equal(out, wanted)
    assert torch.equal(pool, expected)


@pytest.mark.parametrize("case", CASES[:4], ids=IDS[:4])
def test_captured_prefill_replays_with_new_lengths(case: Case) -> None:
    inputs = case.make((300,), torch.bfloat16)
    pool, out = case.pool(3), nan_like(inputs)
    slots = torch.arange(3, device="cuda")
    cu = torch.tensor([0, 100, 200, 300], device="cuda", dtype=torch.int32)
    arguments = {**inputs, "cu_seqlens": cu, "slots": slots}
    case.prefill(**arguments, pool=pool, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.prefill(**arguments, pool=pool, out=out)
    cu.copy_(torch.tensor([0, 7, 7, 300]))
    expected = pool.clone()
    wanted = case.prefill(**arguments, pool=expected)
    graph.replay()
    assert torch.equal(out, wanted)
    assert torch.equal(pool, expected)


@pytest.mark.parametrize("case", CASES[:4], ids=IDS[:4])
@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_ignore_the_batch_and_the_cached_prefix(
    case: Case, pool_dtype: torch.dtype
) -> None:
    lengths = [300, 5, 700]
    cu = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    inputs = case.make((sum(lengths),), torch.bfloat16)
    pool = case.pool(8).to(pool_dtype)
    alone = pool.clone()
    table = torch.full((3, 4), -1, device="cuda")
    table[0, 3] = 6
    common = {"round_boundaries": True}
    slots = torch.arange(3, device="cuda")
    together = case.prefill(
        **inputs, cu_seqlens=cu, pool=pool, slots=slots, boundary_slots=table, **common
    )
    first = {name: x[:300] for name, x in inputs.items()}
    single = case.prefill(
        **first, cu_seqlens=cu[:2], pool=alone, slots=slots[:1], **common
    )
    assert torch.equal(together[:300], single)
    assert torch.equal(pool[0], alone[0])
    rest = {name: x[256:300] for name, x in inputs.items()}
    short = torch.tensor([0, 44], device="cuda", dtype=torch.int32)
    resumed = case.prefill(
        **rest, cu_seqlens=short, pool=pool, slots=slots[:1] + 6, **common
    )
    assert torch.equal(together[256:300], resumed)
    assert torch.equal(pool[0], pool[6])
    many = case.make((64,), torch.bfloat16)
    states = case.pool(64).to(pool_dtype)
    other = states[:1].clone()
    rows = torch.arange(64, device="cuda")
    batch = case.update(**many, pool=states, slots=rows)
    one = {name: x[:1] for name, x in many.items()}
    assert torch.equal(batch[:1], case.update(**one, pool=other, slots=rows[:1]))
    assert torch.equal(states[:1], other)
