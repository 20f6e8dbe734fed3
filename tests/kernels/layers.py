# SPDX-License-Identifier: Apache-2.0
"""Every state layer of `hybrid_kernels` with its definition, for tests of them all.

A definition runs one sequence token by token in float64, written from the paper's
formulas and not from the library.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from hybrid_kernels import (
    causal_conv1d,
    gated_delta_rule,
    kda,
    lightning_attention,
    replay,
    rg_lru,
    selective_scan,
    ssd,
)
from torch.nn import functional

Tensors = dict[str, torch.Tensor]
Advance = Callable[[Tensors, torch.Tensor, bool], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Layer:
    """One operation at one shape."""

    name: str
    module: ModuleType
    item: tuple[int, ...]
    """Shape of a state."""
    out: tuple[int, ...]
    """Shape of a token's output."""
    rows: Callable[[], dict[str, tuple[int, ...]]]
    """Shapes of what each token has."""
    constants: Callable[[], Tensors]
    advance: Advance
    """One token: float64 operands and state, and whether there is no state yet."""
    rounded: tuple[str, ...]
    """Operands that a model has in its own type; the others stay float32."""
    options: dict[str, Any] = field(default_factory=dict)

    def make(
        self, *lead: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> Tensors:
        """Operands of ``[*lead]`` tokens, by the names the operation gives them."""
        inputs = {
            name: prepare(name, torch.randn(*lead, *shape, device=device))
            for name, shape in self.rows().items()
        }
        fixed = {name: tensor.to(device) for name, tensor in self.constants().items()}
        inputs |= fixed
        return {n: x.to(dtype) if n in self.rounded else x for n, x in inputs.items()}

    def part(self, inputs: Tensors, index: Any) -> Tensors:
        """The operands of some tokens."""
        names = self.rows()
        return {name: x[index] if name in names else x for name, x in inputs.items()}

    def states(
        self,
        slots: int,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> torch.Tensor:
        """A random pool whose slots are further apart than their size."""
        room = torch.randn(slots, 3, *self.item, device=device)
        if len(self.item) == 3:
            room *= self.item[-1] ** -0.5
        if self.module is causal_conv1d:
            # As engines keep it: channels contiguous.
            room = room.transpose(2, 3).contiguous().transpose(2, 3)
        return room.to(dtype)[:, 1]

    def define(
        self, inputs: Tensors, state: torch.Tensor, fresh: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One sequence ``[T]``: outputs and the final state, float64."""
        wide = {name: x.double() for name, x in inputs.items()}
        names = self.rows()
        tokens = len(wide[next(iter(names))])
        state = torch.zeros_like(state) if fresh else state
        state, outs = state.double(), []
        for t in range(tokens):
            out, state = self.advance(self.part(wide, t), state, fresh and t == 0)
            outs.append(out)
        empty = state.new_zeros(0, *self.out)
        return (torch.stack(outs) if outs else empty), state

    def prefill(self, inputs: Tensors, **tables: Any) -> torch.Tensor:
        """The operation's `prefill`."""
        return self.module.prefill(**inputs, **tables, **self.options)

    def update(self, inputs: Tensors, **tables: Any) -> torch.Tensor:
        """The operation's `update`."""
        return self.module.update(**inputs, **tables, **self.options)

    def verify(self, inputs: Tensors, **tables: Any) -> torch.Tensor:
        """The operation's `verify`."""
        return self.module.verify(**inputs, **tables, **self.options)

    def record(
        self, pool: torch.Tensor, rows: int, drafts: int
    ) -> replay.States | replay.Windows:
        """What replays drafts into a pool, its record full of NaN."""

        def empty(size: int, dtype: torch.dtype) -> torch.Tensor:
            # Apart from each other, as slices of one tensor for all layers are.
            shape = (rows, 2, drafts + 1, size)
            room = torch.full(shape, torch.nan, dtype=dtype, device=pool.device)
            return room[:, 1, :drafts]

        if self.module is causal_conv1d:
            return replay.Windows(pool, empty(pool.shape[1], pool.dtype))
        shapes = self.rows()
        heads = shapes["B" if "B" in shapes else "k"][0]
        wide = self.module is kda
        size = replay.record_size(pool, heads, wide_decay=wide)
        return replay.States(pool, empty(size, torch.float32), heads, wide)

    @property
    def rounding(self) -> dict[str, bool]:
        """What asks `prefill` for bits that a restored prefix leaves alone."""
        return {} if self.module is causal_conv1d else {"round_boundaries": True}


def prepare(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Random numbers in the range that an operand of this name has in a model."""
    if name in ("q", "k", "B"):
        return functional.normalize(tensor, dim=-1)
    if name in ("g", "decay"):
        return -functional.softplus(tensor - 1)
    if name == "beta":
        return tensor.sigmoid()
    return tensor - 2 if name == "dt" else tensor


def softplus(x: torch.Tensor) -> torch.Tensor:
    return torch.logaddexp(x, torch.zeros_like(x))


def heads_of(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """One row for every value head."""
    return tensor.repeat_interleave(like.shape[0] // tensor.shape[0], 0)


def outer(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left[:, :, None] * right[:, None, :]


def delta_token(
    x: Tensors, state: torch.Tensor, fresh: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """``S (I - beta k k^T)`` after decay, plus ``beta v k^T``; both delta rules."""
    q, k = heads_of(x["q"], x["v"]), heads_of(x["k"], x["v"])
    g, beta = x["g"], x["beta"]
    if "A" in x:
        rate = x["A"] if g.ndim == 1 else x["A"][:, None]
        g, beta = rate * softplus(g + x["dt_bias"]), 1 / (1 + (-beta).exp())
        q, k = (y / y.norm(dim=-1, keepdim=True) for y in (q, k))
    decay = g.exp()[:, None, None] if g.ndim == 1 else g.exp()[:, None, :]
    state, beta = state * decay, beta[:, None, None]
    erased = torch.einsum("hvk,hk->hv", state, k)
    state = state - beta * outer(erased, k) + beta * outer(x["v"], k)
    return torch.einsum("hvk,hk->hv", state, q) * q.shape[-1] ** -0.5, state


def ssd_token(
    x: Tensors, state: torch.Tensor, fresh: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    b, c = heads_of(x["B"], x["x"]), heads_of(x["C"], x["x"])
    time = softplus(x["dt"] + x["dt_bias"])
    state = state * (time * x["A"]).exp()[:, None, None]
    state = state + time[:, None, None] * outer(x["x"], b)
    y = torch.einsum("hpd,hd->hp", state, c) + x["skip"][:, None] * x["x"]
    return y * x["gate"] / (1 + (-x["gate"]).exp()), state


def lightning_token(
    x: Tensors, state: torch.Tensor, fresh: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    q, k = heads_of(x["q"], x["v"]), heads_of(x["k"], x["v"])
    state = state * x["decay"].exp()[:, None, None] + outer(x["v"], k)
    return torch.einsum("hvk,hk->hv", state, q), state


def lru_token(
    x: Tensors, state: torch.Tensor, fresh: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    a = (x["A"] / (1 + (-x["recurrence_gate"]).exp())).exp()
    factor = 1 if fresh else (1 - a**2) ** 0.5
    state = a * state + factor * x["x"] / (1 + (-x["input_gate"]).exp())
    return state, state


def scan_token(
    x: Tensors, state: torch.Tensor, fresh: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    time = softplus(x["dt"] + x["dt_bias"])
    state = (time[:, None] * x["A"]).exp() * state
    state = state + torch.outer(time * x["x"], x["B"])
    y = state @ x["C"] + x["skip"] * x["x"]
    return y * x["gate"] / (1 + (-x["gate"]).exp()), state


def conv_token(
    x: Tensors, state: torch.Tensor, fresh: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    line = torch.cat([state, x["x"][:, None]], dim=1)
    y = (line * x["weight"]).sum(1) + x["bias"]
    return y / (1 + (-y).exp()), line[:, 1:]


def delta_rule(
    module: ModuleType,
    heads: int,
    values: int,
    depth: int,
    width: int,
    decays: tuple[int, ...],
    fused: bool,
) -> Layer:
    shapes = {"q": (heads, depth), "k": (heads, depth), "v": (values, width)}
    shapes |= {"g": decays, "beta": (values,)}
    gates = {"A": (values,), "dt_bias": decays} if fused else {}
    name = "kda" if module is kda else "delta"
    return Layer(
        f"{name}-{heads}x{depth}-{values}x{width}" + "-fused" * fused,
        module,
        (values, width, depth),
        (values, width),
        lambda: shapes,
        lambda: {name: -torch.rand(shape) for name, shape in gates.items()},
        delta_token,
        ("q", "k", "v"),
        {"use_qk_l2norm": fused},
    )


def delta(heads: int, values: int, depth: int, width: int, fused: bool) -> Layer:
    shape = (heads, values, depth, width)
    return delta_rule(gated_delta_rule, *shape, (values,), fused)


def kimi(heads: int, values: int, depth: int, width: int, fused: bool) -> Layer:
    shape = (heads, values, depth, width)
    return delta_rule(kda, *shape, (values, depth), fused)


def mamba2(groups: int, heads: int, depth: int, width: int) -> Layer:
    shapes: dict[str, tuple[int, ...]] = {"x": (heads, width), "dt": (heads,)}
    shapes |= {"B": (groups, depth), "C": (groups, depth), "gate": (heads, width)}
    return Layer(
        f"ssd-{groups}x{depth}-{heads}x{width}",
        ssd,
        (heads, width, depth),
        (heads, width),
        lambda: shapes,
        lambda: {
            "A": -torch.rand(heads) * 4,
            "skip": torch.randn(heads),
            "dt_bias": torch.randn(heads),
        },
        ssd_token,
        ("x", "B", "C", "gate"),
    )


def lightning(
    heads: int, values: int, depth: int, width: int, gated: bool = False
) -> Layer:
    shapes = {"q": (heads, depth), "k": (heads, depth), "v": (values, width)}
    shapes |= {"decay": (values,)} if gated else {}
    return Layer(
        f"lightning-{heads}x{depth}-{values}x{width}" + "-gated" * gated,
        lightning_attention,
        (values, width, depth),
        (values, width),
        lambda: shapes,
        lambda: {} if gated else {"decay": -torch.rand(values)},
        lightning_token,
        ("q", "k", "v"),
    )


def griffin(channels: int) -> Layer:
    names = ("x", "input_gate", "recurrence_gate")
    return Layer(
        f"rg_lru-{channels}",
        rg_lru,
        (channels,),
        (channels,),
        lambda: dict.fromkeys(names, (channels,)),
        lambda: {"A": -8 * torch.rand(channels)},
        lru_token,
        names,
    )


def mamba1(channels: int, depth: int) -> Layer:
    shapes = {"x": (channels,), "dt": (channels,), "B": (depth,), "C": (depth,)}
    shapes |= {"gate": (channels,)}
    return Layer(
        f"selective_scan-{channels}x{depth}",
        selective_scan,
        (channels, depth),
        (channels,),
        lambda: shapes,
        lambda: {
            "A": -torch.rand(channels, depth) * 4,
            "skip": torch.randn(channels),
            "dt_bias": torch.randn(channels),
        },
        scan_token,
        ("x", "dt", "B", "C", "gate"),
    )


def convolution(channels: int, width: int) -> Layer:
    return Layer(
        f"conv-{channels}x{width}",
        causal_conv1d,
        (channels, width - 1),
        (channels,),
        lambda: {"x": (channels,)},
        lambda: {"weight": torch.randn(channels, width), "bias": torch.randn(channels)},
        conv_token,
        ("x", "weight", "bias"),
        {"activation": "silu"},
    )


SMALL = [
    delta(1, 2, 24, 20, fused=False),
    delta(2, 2, 60, 16, fused=True),
    kimi(1, 2, 24, 20, fused=False),
    kimi(2, 2, 60, 16, fused=True),
    mamba2(2, 4, 40, 20),
    lightning(2, 4, 24, 20),
    lightning(2, 2, 24, 21, gated=True),
    griffin(40),
    mamba1(40, 5),
    *(convolution(140, width) for width in (2, 3, 4, 5)),
]
"""Small enough for Triton's interpreter."""

REPLAYED = [
    delta(1, 2, 12, 5, fused=False),
    delta(2, 2, 12, 5, fused=True),
    kimi(1, 2, 12, 5, fused=False),
    kimi(2, 2, 12, 5, fused=True),
    mamba2(1, 2, 12, 5),
    lightning(1, 2, 12, 5),
    *(convolution(70, width) for width in (2, 3, 4, 5)),
]
"""Layers whose drafts can be packed, and replayed from a record; smaller still."""

LARGE = [
    delta(1, 1, 60, 64, fused=False),
    delta(2, 4, 64, 60, fused=True),
    delta(1, 2, 128, 128, fused=False),
    delta(1, 1, 256, 64, fused=True),
    kimi(1, 1, 60, 64, fused=False),
    kimi(2, 4, 64, 60, fused=True),
    kimi(1, 2, 128, 128, fused=False),
    kimi(1, 1, 256, 64, fused=True),
    mamba2(1, 1, 60, 64),
    mamba2(2, 4, 64, 60),
    mamba2(1, 2, 128, 64),
    mamba2(2, 2, 256, 128),
    lightning(1, 1, 60, 64),
    lightning(2, 4, 64, 60),
    lightning(1, 2, 128, 128),
    lightning(1, 1, 256, 64),
    griffin(257),
    mamba1(257, 16),
    convolution(257, 4),
]
"""Heads as models have them."""
MANY_HEADS = delta(16, 64, 128, 128, fused=True)
"""Those of Qwen3.5-397B-A17B."""


def names(layers: list[Layer]) -> list[str]:
    """Test ids."""
    return [layer.name for layer in layers]
