# SPDX-License-Identifier: Apache-2.0
"""Reference of the recurrence that several state layers share.

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

import torch

from hybrid_kernels._common.varlen import (
    CHUNK,
    boundaries,
    parent_of,
    read_state,
    spans,
    write_state,
)

EPSILON = 1e-6
"""Added to the squared norm of queries and keys before normalising."""


@dataclass(frozen=True)
class Tokens:
    """Float32 operands with one row of heads per token: ``[..., H, dim]``."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor | None

    def __getitem__(self, index: object) -> Tokens:
        def pick(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[index]  # type: ignore[index]

        beta = None if self.beta is None else pick(self.beta)
        return Tokens(pick(self.q), pick(self.k), pick(self.v), pick(self.g), beta)


def tokens(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor | None,
    *,
    scale: float,
    normalise: bool = False,
) -> Tokens:
    """Convert operands, and repeat query and key heads for their value heads."""
    heads = v.shape[-2]
    q, k = _per_value_head(q.float(), heads), _per_value_head(k.float(), heads)
    if normalise:
        q, k = _unit(q), _unit(k)
    wide = g.float()
    if wide.ndim == v.ndim - 1:
        wide = wide[..., None]
    rates = None if beta is None else beta.float()[..., None]
    return Tokens(q * scale, k, v.float(), wide, rates)


def softplus(x: torch.Tensor) -> torch.Tensor:
    """``log(1 + exp(x))`` in float32."""
    return torch.nn.functional.softplus(x.float())


def step(token: Tokens, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Advance states ``[..., V, K]`` by one token; the output and the new states."""
    state = state * token.g.exp()[..., None, :]
    value = token.v
    if token.beta is not None:
        value = token.beta * (value - _apply(state, token.k))
    state = state + value[..., :, None] * token.k[..., None, :]
    return _apply(state, token.q), state


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


def prefill(
    batch: Tokens,
    cu_seqlens: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    has_initial: torch.Tensor | None,
    boundary_slots: torch.Tensor | None,
    round_boundaries: bool,
    out: torch.Tensor,
) -> None:
    """Run packed sequences chunk by chunk and write the states asked for."""
    # One decay per channel needs a [C, C, K] product: keep it small.
    size = CHUNK if batch.g.shape[-1] == 1 else CHUNK // 4
    for span in spans(cu_seqlens):
        state = read_state(pool, slots, has_initial, span.index)
        keep = dict(boundaries(boundary_slots, span))
        for start in range(span.start, span.end, size):
            end = min(start + size, span.end)
            result, state = chunk(batch[start:end], state)
            out[start:end] = result
            done = end - span.start
            if round_boundaries and done % CHUNK == 0:
                state = state.to(pool.dtype).float()
            if done in keep:
                write_state(pool, keep[done], state)
        write_state(pool, int(slots[span.index]), state)


def steps(
    batch: Tokens,
    pool: torch.Tensor,
    slots: torch.Tensor,
    draft_slots: torch.Tensor,
    parents: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Run ``[N, L]`` tokens, each from its parent's state; keep every state."""
    if parents is None and draft_slots.shape[1] == 1:
        _steps_at_once(batch[:, 0], pool, slots, draft_slots[:, 0], out[:, 0])
        return
    for row in range(draft_slots.shape[0]):
        main = read_state(pool, slots, None, row)
        states: list[torch.Tensor] = []
        for draft in range(draft_slots.shape[1]):
            parent = parent_of(parents, row, draft)
            state = main if parent < 0 else states[parent]
            out[row, draft], state = step(batch[row, draft], state)
            states.append(state.to(pool.dtype).float())
        for draft, state in enumerate(states):
            write_state(pool, int(draft_slots[row, draft]), state)


def _steps_at_once(
    batch: Tokens,
    pool: torch.Tensor,
    slots: torch.Tensor,
    targets: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """One token for each row, vectorised over rows."""
    state = pool[slots.long().clamp(min=0)].float()
    state[slots < 0] = 0
    result, state = step(batch, state)
    out.copy_(result)
    keep = targets >= 0
    pool[targets[keep].long()] = state[keep].to(pool.dtype)


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
