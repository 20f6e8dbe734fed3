# SPDX-License-Identifier: Apache-2.0
"""The matrix memory of xLSTM, mLSTM (Beck et al. 2024, "xLSTM: Extended Long Short-Term
Memory", arXiv:2405.04517, equations 19 to 27).

Per head, with ``f`` the sigmoid of the forget gate and ``i`` the exponential of the
input gate,

    C = f C + i v k^T,    n = f n + i k
    h = C q / max(|n^T q|, 1)

`C` and `n` are kept divided by ``exp(m)``, with a stabiliser `m` that follows the
largest exponent: ``m = max(log f + m, log i)``.

The recurrence is linear attention with a decay of each token, and `n` is one more value
channel, whose inputs are ones.

`H` heads of `K` key and `V` value channels, `S` slots, `T` packed tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hybrid_kernels import lightning_attention, state_copy
from torch.nn import functional

from hybrid_plugin.core.commands import CHUNK
from hybrid_plugin.mixers.prefills import Prefills

STEPS = 1 << 18
"""Steps of a stabiliser between two whole numbers.

Any stabiliser near the largest exponent will do.  Sums of whole steps do not depend on
their order, so a token's bits do not depend on how its prompt was split; and steps of
gates that are capped at 15 fit into float32.
"""


@dataclass(frozen=True, slots=True)
class Weights:
    """Of one layer, as far as the mixer needs them."""

    eps: float
    """Added to the denominator of ``h``, divided by ``exp(m)``."""


def state_shape(heads: int, keys: int, values: int) -> tuple[int, int]:
    """The shape of a state: rows of `keys` numbers.

    Of each head `values` rows of ``C`` and one of ``n``; then the heads' ``m``.
    """
    return heads * (values + 1) + -(-heads // keys), keys


def prefill(
    weights: Weights,
    prefills: Prefills,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    input_gate: torch.Tensor,
    forget_gate: torch.Tensor,
    states: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run packed sequences; leave their states in their slots.

    Args:
        weights: of the layer.
        prefills: the sequences.
        q: ``[T, H, K]``.
        k: ``[T, H, K]``.
        v: ``[T, H, V]``.
        input_gate: ``[T, H]``, ``log i``.
        forget_gate: ``[T, H]``, before the sigmoid.
        states: ``[S, *state_shape]``, float32, rows dense.
        out: ``[T, H, V]``, written if given.

    Returns:
        `out`, or a new tensor of `v`'s type.

    Raises:
        ValueError: if shapes do not fit.
    """
    memory, stabilisers = _parts(states, q.shape[1], v.shape[2])
    gates = _Gates.of(input_gate, forget_gate)
    before = _stabilisers(stabilisers, prefills.slots)
    before = before * prefills.has_initial[:, None]
    rows = torch.arange(len(q), device=q.device)
    bounds = prefills.cu_seqlens.long()
    sequence = torch.searchsorted(bounds[1:], rows, right=True)
    sequence = sequence.clamp(max=before.shape[0] - 1)
    # Padding behind the last sequence counts as more of it.
    behind = rows - bounds[sequence]
    after, previous = _scan(gates, before[sequence], behind)
    heads = lightning_attention.prefill(
        q,
        k,
        _with_ones(v, gates.inflow(after)),
        gates.decay(previous, after),
        prefills.cu_seqlens,
        memory,
        prefills.slots,
        has_initial=prefills.has_initial,
        boundary_slots=prefills.boundary_slots,
        offsets=prefills.offsets,
        round_boundaries=prefills.round_states,
        scale=q.shape[-1] ** -0.5,
    )
    last = after[(bounds[1:] - 1).clamp(min=0)]
    last = torch.where(bounds.diff()[:, None] > 0, last, before)
    _keep(stabilisers, prefills.slots, last)
    if prefills.boundary_slots is not None:
        _keep_boundaries(stabilisers, prefills, prefills.boundary_slots, after)
    result = torch.empty_like(v) if out is None else out
    return result.copy_(_normalised(heads, after, weights))


def decode(
    weights: Weights,
    slots: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    input_gate: torch.Tensor,
    forget_gate: torch.Tensor,
    states: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run one token per sequence and advance the states; shapes as for `prefill`.

    A CUDA graph may capture it.

    Args:
        slots: ``[T]``, int32 or int64; negative for padding.

    Returns:
        `out`, or a new tensor of `v`'s type.

    Raises:
        ValueError: if shapes do not fit.
    """
    memory, stabilisers = _parts(states, q.shape[1], v.shape[2])
    gates = _Gates.of(input_gate, forget_gate)
    before = _stabilisers(stabilisers, slots)
    after = torch.maximum(gates.forget_steps + before, gates.input_steps)
    heads = lightning_attention.update(
        q,
        k,
        _with_ones(v, gates.inflow(after)),
        gates.decay(before, after),
        memory,
        slots,
        scale=q.shape[-1] ** -0.5,
    )
    _keep(stabilisers, slots, after)
    result = torch.empty_like(v) if out is None else out
    return result.copy_(_normalised(heads, after, weights))


@dataclass(frozen=True, slots=True)
class _Gates:
    """Of some tokens, ``[T, H]`` each."""

    log_input: torch.Tensor
    log_forget: torch.Tensor
    input_steps: torch.Tensor
    forget_steps: torch.Tensor
    """Both in steps, int64; the latter rounded up, so that no decay exceeds one."""

    @staticmethod
    def of(input_gate: torch.Tensor, forget_gate: torch.Tensor) -> _Gates:
        """As a layer computes them."""
        log_input = input_gate.float()
        log_forget = functional.logsigmoid(forget_gate.float())
        return _Gates(
            log_input,
            log_forget,
            (log_input * STEPS).round().long(),
            (log_forget * STEPS).ceil().long(),
        )

    def decay(self, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        """What remains of a state, a logarithm; of stabilisers around a token."""
        return self.log_forget + (before - after).float() / STEPS

    def inflow(self, after: torch.Tensor) -> torch.Tensor:
        """What a token's value is multiplied by."""
        return (self.log_input - after.float() / STEPS).exp()


def _scan(
    gates: _Gates, initial: torch.Tensor, behind: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stabilisers after and before each token, in steps.

    A token's pair of gates maps one to the next, ``m -> max(forget + m, input)``; such
    maps are composed over twice as many tokens each time.

    Args:
        gates: of the tokens.
        initial: ``[T, H]``: of the token's sequence before its first token.
        behind: ``[T]``: tokens of the sequence before it.
    """
    first = (behind == 0)[:, None]
    added, reached = gates.forget_steps, gates.input_steps
    reached = torch.where(first, torch.maximum(reached, added + initial), reached)
    distance = 1
    while distance < len(behind):
        is_inside = (behind >= distance)[:, None]
        further = torch.maximum(reached, added + reached.roll(distance, 0))
        reached = torch.where(is_inside, further, reached)
        added = torch.where(is_inside, added + added.roll(distance, 0), added)
        distance *= 2
    return reached, torch.where(first, initial, reached.roll(1, 0))


def _parts(
    states: torch.Tensor, heads: int, values: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of ``C`` and ``n``, ``[S, H, V + 1, K]``, and of ``m``, ``[S, H]``."""
    rows = heads * (values + 1)
    memory = states[:, :rows].view(len(states), heads, values + 1, -1)
    return memory, states[:, rows:].flatten(1)[:, :heads]


def _stabilisers(pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Those in slots, in steps, ``[N, H]``; zero for padding."""
    found = pool.new_zeros(slots.numel(), pool.shape[1])
    state_copy.gather(found, pool, slots)
    return (found * STEPS).round().long()


def _keep(pool: torch.Tensor, slots: torch.Tensor, steps: torch.Tensor) -> None:
    """Write stabilisers ``[N, H]`` to slots."""
    state_copy.scatter(pool, slots, steps.to(pool.dtype) / STEPS)


def _keep_boundaries(
    pool: torch.Tensor, prefills: Prefills, table: torch.Tensor, after: torch.Tensor
) -> None:
    """Write the stabilisers at multiples of 64 tokens to the slots of a table."""
    bounds = prefills.cu_seqlens.long()
    column = torch.arange(1, table.shape[1] + 1, device=table.device)
    ends = bounds[:-1, None] + CHUNK * column - prefills.offsets[:, None]
    slots = torch.where(ends <= bounds[1:, None], table, -1)
    tokens = (ends - 1).clamp(0, len(after) - 1)
    _keep(pool, slots.flatten(), after[tokens.flatten()])


def _with_ones(v: torch.Tensor, inflow: torch.Tensor) -> torch.Tensor:
    """Values, and a channel of ones, times what flows in, ``[T, H, V + 1]``."""
    return functional.pad(v.float(), (0, 1), value=1.0) * inflow[..., None]


def _normalised(
    heads: torch.Tensor, after: torch.Tensor, weights: Weights
) -> torch.Tensor:
    """``h [T, H, V]`` of ``C q`` and ``n^T q``, ``[T, H, V + 1]``."""
    least = (after.float() / -STEPS).exp()[..., None]
    return heads[..., :-1] / (heads[..., -1:].abs().maximum(least) + weights.eps)
