# SPDX-License-Identifier: Apache-2.0
"""The recurrence that several state layers share, and its reference.

With a state ``S`` of shape ``[V, K]`` per head, each token does

    S = S * exp(g)                     g: one number, or one per key channel
    u = v                              plain linear attention, or
    u = beta * (v - S k)               the delta rule
    S = S + u k^T
    o = scale * S q

Mamba-2 is the plain form with ``q = C, k = B, v = dt x, g = dt A``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn import functional

from hybrid_kernels._common import operation
from hybrid_kernels._common.checks import check_last_contiguous, check_shape, require
from hybrid_kernels._common.tables import CHUNK, Drafts, Sequences
from hybrid_kernels._common.varlen import DraftStates, spans, write_state

EPSILON = 1e-6
"""Added to the squared norm of queries and keys before normalising."""


@dataclass(frozen=True)
class Operands(operation.Operands):
    """Tokens with `H` key heads and `HV` value heads, and what the layer does."""

    PER_TOKEN: ClassVar[tuple[str, ...]] = ("q", "k", "v", "g", "beta", "gate")
    DIMENSIONS: ClassVar[int] = 2

    q: torch.Tensor
    """``[..., H, K]``."""
    k: torch.Tensor
    """``[..., H, K]``."""
    v: torch.Tensor
    """``[..., HV, V]``."""
    g: torch.Tensor
    """``[..., HV]`` or ``[..., HV, K]``: log decay, or what it is made of."""
    beta: torch.Tensor | None = None
    """``[..., HV]``; None for plain linear attention."""
    A: torch.Tensor | None = None
    """``[HV]``: the log decay is ``A * softplus(g + dt_bias)`` instead of ``g``."""
    dt_bias: torch.Tensor | None = None
    """``[HV]``, or ``[HV, K]`` as `g` has; used with `A` only."""
    scale_v: bool = False
    """Multiply values by the softplus (Mamba-2's ``dt x``)."""
    skip: torch.Tensor | None = None
    """``[HV]``: ``skip * v`` is added to the output."""
    gate: torch.Tensor | None = None
    """``[..., HV, V]``: the output is multiplied by ``silu(gate)``."""
    scale: float = 1.0
    use_qk_l2norm: bool = False
    """Divide queries and keys by their 2-norm first."""
    names: tuple[str, str, str] = ("q", "k", "v")
    """What a message calls the first three."""

    @property
    def values(self) -> torch.Tensor:
        """What the output is shaped like."""
        return self.v

    @property
    def wide_g(self) -> bool:
        """Whether every key channel decays by itself."""
        return self.g.ndim == self.v.ndim

    @property
    def sigmoid_beta(self) -> bool:
        """Whether `beta` comes before the logistic function."""
        return self.beta is not None and self.A is not None

    def check(self, pool: torch.Tensor) -> None:
        """Require the operands to fit each other and the pool.

        Raises:
            ValueError: if they do not.
        """
        self._check_heads(pool)
        lead, heads = tuple(self.v.shape[:-1]), self.v.shape[-2]
        depth = tuple(self.k.shape[-1:]) if self.wide_g else ()
        check_shape("the decay", self.g, (*lead, *depth))
        if self.wide_g:
            check_last_contiguous("the decay", self.g)
        if self.beta is not None:
            check_shape("beta", self.beta, lead)
        if self.gate is not None:
            check_shape("gate", self.gate, tuple(self.v.shape))
            check_last_contiguous("gate", self.gate)
        for name, vector in (("A", self.A), ("skip", self.skip)):
            if vector is not None:
                check_shape(name, vector, (heads,))
        if self.dt_bias is not None:
            require(self.A is not None, "dt_bias is used with A only")
            check_shape("dt_bias", self.dt_bias, (heads, *depth))
            check_last_contiguous("dt_bias", self.dt_bias)

    def check_record(self, record: torch.Tensor, pool: torch.Tensor) -> None:
        """Require a record of keys, additions and decays, float32.

        Raises:
            ValueError: if it is none.
        """
        size = record_size(pool, self.k.shape[-2], wide_decay=self.wide_g)
        check_shape("record", record, (*record.shape[:2], size))
        known = record.dtype == torch.float32
        require(known, f"record is {record.dtype}, expected torch.float32")

    def _check_heads(self, pool: torch.Tensor) -> None:
        tensors = (self.q, self.k, self.v)
        for name, tensor in zip(self.names, tensors, strict=True):
            require(tensor.ndim == self.v.ndim, f"{name} has {tensor.ndim} dimensions")
            check_last_contiguous(name, tensor)
        lead, (heads, depth) = tuple(self.v.shape[:-2]), self.k.shape[-2:]
        check_shape(self.names[0], self.q, (*lead, heads, depth))
        check_shape(self.names[1], self.k, (*lead, heads, depth))
        values, width = self.v.shape[-2:]
        require(
            heads > 0 and values % heads == 0,
            f"{values} heads are no multiple of {heads} groups of {self.names[1]}",
        )
        require(depth <= 256, f"{self.names[1]} has {depth} channels, at most 256 fit")
        check_shape("pool", pool, (pool.shape[0], values, width, depth))


def record_size(pool: torch.Tensor, key_heads: int, *, wide_decay: bool) -> int:
    """Numbers that a record keeps of a token: keys, then ``u``, then decays.

    Args:
        pool: ``[S, HV, V, K]``.
        key_heads: `H`.
        wide_decay: whether every key channel decays by itself.
    """
    _, heads, width, depth = pool.shape
    return key_heads * depth + heads * (width + (depth if wide_decay else 1))


@dataclass(frozen=True)
class Tokens:
    """Operands in float32, one query and key head for every value head."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    """``[..., HV, K]`` or ``[..., HV, 1]``."""
    beta: torch.Tensor | None
    """``[..., HV, 1]``."""

    def __getitem__(self, index: object) -> Tokens:
        def pick(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[index]  # type: ignore[index]

        beta = None if self.beta is None else pick(self.beta)
        return Tokens(pick(self.q), pick(self.k), pick(self.v), pick(self.g), beta)


def tokens(operands: Operands) -> Tokens:
    """Compute gates, scale and normalise, and repeat heads."""
    heads = operands.v.shape[-2]
    q, k, v = operands.q.float(), operands.k.float(), operands.v.float()
    q, k = _per_value_head(q, heads), _per_value_head(k, heads)
    if operands.use_qk_l2norm:
        q, k = _unit(q), _unit(k)
    g = operands.g.float()
    if not operands.wide_g:
        g = g[..., None]
    beta = None if operands.beta is None else operands.beta.float()[..., None]
    if operands.A is not None:
        if operands.dt_bias is not None:
            g = g + operands.dt_bias.float().view(heads, -1)
        time = functional.softplus(g)
        g = time * operands.A.float()[:, None]
        beta = None if beta is None else beta.sigmoid()
        v = v * time if operands.scale_v else v
    return Tokens(q * operands.scale, k, v, g, beta)


def finish(result: torch.Tensor, operands: Operands) -> torch.Tensor:
    """Add the skip connection and apply the gate."""
    if operands.skip is not None:
        result = result + operands.v.float() * operands.skip.float()[:, None]
    if operands.gate is not None:
        result = result * functional.silu(operands.gate.float())
    return result


def step(
    token: Tokens, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Advance states ``[..., V, K]`` by one token.

    Returns:
        The output, the new states, and ``u``, what the token adds along its key.
    """
    decay, u = token.g.exp(), token.v
    if token.beta is not None:
        u = token.beta * (u - _apply(state * decay[..., None, :], token.k))
    state = fold(state, decay, token.k, u)
    return _apply(state, token.q), state, u


def fold(
    state: torch.Tensor, decay: torch.Tensor, k: torch.Tensor, u: torch.Tensor
) -> torch.Tensor:
    """``S * decay + u k^T``: what a token does to states ``[..., V, K]``."""
    state = state * decay[..., None, :]
    return state + u[..., :, None] * k[..., None, :]


def chunk(part: Tokens, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Advance one sequence by up to `CHUNK` tokens at once.

    With ``G`` the running sum of ``g``, the corrected values of the delta rule
    solve ``(I + A) U = beta (V - exp(G) K S^T)`` where
    ``A[i, j] = beta[i] sum_k k[i] k[j] exp(G[i] - G[j])`` for ``j < i``; outputs
    and the new state then are matrix products (Yang et al. 2024,
    arXiv:2412.06464).
    """
    q, k, v, g = (x.transpose(0, 1) for x in (part.q, part.k, part.v, part.g))
    total = g.cumsum(1)
    grow = total.exp()
    value = v
    if part.beta is not None:
        beta = part.beta.transpose(0, 1)
        inner = (beta * _pairs(k, k, total)).tril(-1)
        value = beta * (v - (k * grow) @ state.mT)
        value = torch.linalg.solve_triangular(
            inner, value, upper=False, unitriangular=True
        )
    out = (q * grow) @ state.mT + _pairs(q, k, total).tril() @ value
    last = total[:, -1:]
    state = state * last.exp() + value.mT @ (k * (last - total).exp())
    return out.transpose(0, 1), state


def prefill(operands: Operands, sequences: Sequences, out: torch.Tensor) -> None:
    """Run packed sequences chunk by chunk, vectorised over heads."""
    batch, pool = tokens(operands), sequences.pool
    result = torch.zeros_like(out, dtype=torch.float32)
    # One decay per channel needs a [C, C, K] product: keep it small.
    size = CHUNK // 4 if operands.wide_g else CHUNK
    for span in spans(sequences):
        state = span.state
        for start, end in span.parts(size):
            result[start:end], state = chunk(batch[start:end], state)
            done = end - span.start
            if sequences.round_boundaries and span.at_boundary(done):
                state = state.to(pool.dtype).float()
            write_state(pool, span.keep.get(done, -1), state)
        write_state(pool, span.slot, state)
    out.copy_(finish(result, operands))


def steps(operands: Operands, drafts: Drafts, out: torch.Tensor) -> None:
    """Run drafts, each from its parent's state, vectorised over rows."""
    states = DraftStates(drafts, out)
    group = operands.v.shape[-2] // operands.k.shape[-2]
    for draft in range(states.longest):
        mine = operands.at(states.index(draft))
        token = tokens(mine)
        result, state, u = step(token, states.origin(draft))
        states.put(out, draft, finish(result, mine))
        states.append(state)
        parts = (token.k[:, ::group], u, token.g.exp())
        states.keep(draft, torch.cat([part.flatten(1) for part in parts], 1))
    states.write()


def _apply(state: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
    return (state @ vector[..., None])[..., 0]


def _pairs(
    left: torch.Tensor, right: torch.Tensor, total: torch.Tensor
) -> torch.Tensor:
    """``sum_k left[i] right[j] exp(G[i] - G[j])`` for ``j <= i``, ``[H, C, C]``."""
    # Above the diagonal the difference is positive and would overflow.
    steps = (total[:, :, None] - total[:, None, :]).clamp(max=0).exp()
    if total.shape[-1] == 1:
        return (left @ right.mT) * steps[..., 0]
    return torch.einsum("hik,hjk,hijk->hij", left, right, steps)


def _per_value_head(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    return tensor.repeat_interleave(heads // tensor.shape[-2], dim=-2)


def _unit(tensor: torch.Tensor) -> torch.Tensor:
    norm = tensor.square().sum(-1, keepdim=True) + EPSILON
    return tensor * norm.rsqrt()
