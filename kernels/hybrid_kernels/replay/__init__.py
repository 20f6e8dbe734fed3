# SPDX-License-Identifier: Apache-2.0
"""Fold accepted drafts into main states, in all layers at once.

`verify` can keep a slot for the state after each draft, or, with `record`, only what
the drafts do to a state. A record is much smaller than states: for Qwen3-Next 24 KiB
for each draft and layer, beside a state of 2 MiB. When the engine knows which drafts
it accepts, `commit` reads each sequence's main state once, folds its accepted drafts
into it and writes it back. Main states are then exact after every step, and no slot
is needed but the main one:

    for each layer: verify(..., pool, slots, record=record_of_layer, parents=parents)
    accepted = ...
    replay.commit(layers, slots, accepted, parents=parents)

A layer's record lives from its `verify` to the `commit` of the same step; one tensor
``[layers, R, L, size]`` serves a whole model. Of a draft it holds, as one row:

* for GDN, KDA, Mamba-2 and lightning attention, in float32, the `H` keys as the state
  sees them, ``[H, K]``; what the token adds along them, ``u``, ``[HV, V]``; and the
  decays, ``[HV]``, or ``[HV, K]`` where each key channel has its own. A token turns
  ``S`` into ``S * decay + u k^T``; `u` depends on the draft's path alone.
* for the convolution, in the pool's type, the `D` inputs.

Bits: on a GPU a committed state is that of running the accepted drafts one by one with
`update`, bit for bit, whatever the pool's type: the state is rounded to it after every
draft. Where `verify` ran a chain in matrix form, `u` was summed in another order.

Lists of rows are int32 or int64 tensors on the pools' device and are never read on the
host. `commit` neither allocates nor waits, so it can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybrid_kernels._common.checks import (
    check_index,
    check_last_contiguous,
    check_shape,
    on_gpu,
    require,
)
from hybrid_kernels._common.linear import record_size
from hybrid_kernels.replay import reference

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from hybrid_kernels.replay.triton import Blocks

__all__ = ["Layers", "States", "Windows", "commit", "record_size"]


@dataclass(frozen=True)
class States:
    """The states of one layer, and the record of its drafts."""

    pool: torch.Tensor
    """``[S, HV, V, K]``, key channels contiguous; other strides are free."""
    record: torch.Tensor
    """``[R, L, record_size(pool, H)]``, float32, contiguous along the last."""
    key_heads: int
    """`H`."""
    wide_decay: bool = False
    """Whether every key channel decays by itself, as in KDA."""

    def check(self) -> None:
        """Require pool and record to fit each other.

        Raises:
            ValueError: if they do not.
        """
        require(self.pool.ndim == 4, f"a state pool has {self.pool.ndim} dimensions")
        check_last_contiguous("a state pool", self.pool)
        heads = self.pool.shape[1]
        known = self.key_heads > 0 and heads % self.key_heads == 0
        require(known, f"{heads} heads are no multiple of {self.key_heads} key heads")
        size = record_size(self.pool, self.key_heads, wide_decay=self.wide_decay)
        _check_record(self.record, size)
        type_ = str(self.record.dtype)
        require(type_ == "torch.float32", f"a record of states is {type_}")

    @property
    def kind(self) -> tuple[object, ...]:
        """What all layers of one model have alike."""
        pool = self.pool
        inner = (pool.shape[1:], pool.stride()[1:])
        return pool.dtype, *inner, self.key_heads, self.wide_decay


@dataclass(frozen=True)
class Windows:
    """The windows of one convolution, and the record of its drafts."""

    pool: torch.Tensor
    """``[S, D, W - 1]``, oldest input first, `W` up to 5; strides are free."""
    record: torch.Tensor
    """``[R, L, D]`` of the pool's type, contiguous along the last dimension."""

    def check(self) -> None:
        """Require pool and record to fit each other.

        Raises:
            ValueError: if they do not.
        """
        require(self.pool.ndim == 3, f"a window pool has {self.pool.ndim} dimensions")
        inputs = self.pool.shape[2]
        require(1 <= inputs <= 4, f"windows have {inputs} inputs, expected 1 to 4")
        _check_record(self.record, self.pool.shape[1])
        same = self.record.dtype == self.pool.dtype
        require(same, f"windows are {self.pool.dtype}, records {self.record.dtype}")


class Layers:
    """All layers whose drafts are committed together.

    Building one copies tables to the device once; using it reads nothing back.
    """

    def __init__(
        self, states: Sequence[States] = (), windows: Sequence[Windows] = ()
    ) -> None:
        """Describe pools and records, which must stay where they are.

        Args:
            states: alike in type, shape and strides of a state, and in key heads.
            windows: of one type, of any numbers of channels and inputs.

        Raises:
            ValueError: if there are no layers, one does not fit, layers are not alike,
                or records differ in rows or drafts.
        """
        self.states, self.windows = tuple(states), tuple(windows)
        layers: list[States | Windows] = [*self.states, *self.windows]
        require(bool(layers), "there are no layers")
        for layer in layers:
            layer.check()
        kinds = {state.kind for state in states}
        require(len(kinds) < 2, "states of one commit differ in type, shape or strides")
        types = {window.pool.dtype for window in windows}
        require(len(types) < 2, f"windows of one commit have the types {types}")
        sizes = {tuple(layer.record.shape[:2]) for layer in layers}
        require(len(sizes) == 1, f"records have the rows and drafts {sorted(sizes)}")
        self.rows, self.drafts = sizes.pop()
        self._blocks: Blocks | None = None
        if on_gpu(layers[0].pool):
            from hybrid_kernels.replay import triton

            self._blocks = triton.blocks_of(self.states, self.windows)

    @property
    def blocks(self) -> Blocks:
        """What the kernel reads; only where Triton runs it."""
        assert self._blocks is not None
        return self._blocks


def commit(
    layers: Layers,
    slots: torch.Tensor,
    accepted: torch.Tensor,
    *,
    parents: torch.Tensor | None = None,
) -> None:
    """Fold each sequence's accepted drafts into its main slot, in one launch.

    Args:
        layers: whose records hold this step's drafts.
        slots: ``[N]``, the main slots that `verify` read; a negative one is padding.
        accepted: ``[N]``: for a chain the number of accepted drafts, for a tree one
            more than the last accepted draft's index, as for `state_copy.promote`. 0
            or a negative number leaves the slot as it is. A number above `L` is
            refused on a CPU, undefined behaviour on a GPU.
        parents: ``[N, P]``, `P` up to `L`, as `verify` had them; None for chains.

    Raises:
        ValueError: if shapes do not fit, or `slots` or `accepted` has gaps.
    """
    rows = slots.numel()
    for name, table in (("slots", slots), ("accepted", accepted)):
        check_index(name, table, (rows,))
        check_last_contiguous(name, table)
    require(rows <= layers.rows, f"{rows} rows, but records of {layers.rows}")
    if parents is not None:
        require(parents.ndim == 2, "parents has not 2 dimensions")
        check_index("parents", parents, (rows, parents.shape[1]))
        fits = parents.shape[1] <= layers.drafts
        require(fits, f"trees of {parents.shape[1]} drafts, records of {layers.drafts}")
    if on_gpu(slots):
        from hybrid_kernels.replay import triton

        triton.commit(layers, slots, accepted, parents)
    else:
        reference.commit(layers, slots, accepted, parents)


def _check_record(record: torch.Tensor, size: int) -> None:
    require(record.ndim == 3, f"a record has {record.ndim} dimensions, expected 3")
    check_shape("a record", record, (*record.shape[:2], size))
    check_last_contiguous("a record", record)
