# SPDX-License-Identifier: Apache-2.0
"""A forward pass as the mixers need it described: once, however many layers it has.

vLLM orders a batch so that sequences with one token come first.  Everything is computed
on the device from what vLLM has there anyway; nothing waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from hybrid_plugin.core.commands import CHUNK, COLUMNS
from hybrid_plugin.mixers.long_prefill import LongKernel, divide
from hybrid_plugin.mixers.prefills import Prefills
from hybrid_plugin.mixers.state_pass import StatePass
from hybrid_plugin.vllm.kernels.fixed_shape import PrefillTables
from hybrid_plugin.vllm.kernels.verification_tables import VerificationTables

if TYPE_CHECKING:
    from hybrid_plugin.device.interior import InteriorSnapshots

_PASS = "hybrid_plugin_pass"
"""Attribute of vLLM's metadata."""
_PADDING = -1


class DecodeSlots:
    """Slots of the passes without prefills: a CUDA graph reads them where they were
    when it was captured.
    """

    def __init__(self, most: int, device: torch.device) -> None:
        """Room for `most` sequences, none of them there yet."""
        self._held = 0
        self._slots = torch.full((most,), _PADDING, dtype=torch.int32, device=device)

    def hold(self, slots: torch.Tensor) -> torch.Tensor:
        """Put a pass's slots there; returns them, or `slots` if they are too many.

        A graph of more sequences than the pass has finds padding behind them.
        """
        count = slots.shape[0]
        if count > self._slots.shape[0]:  # more than any graph has
            return slots
        if count < self._held:
            self._slots[count : self._held].fill_(_PADDING)
        self._held = count
        held = self._slots[:count]
        held.copy_(slots)
        return held


def describe(
    common: Any,
    metadata: Any,
    room: DecodeSlots,
    interior: InteriorSnapshots | None,
    *,
    round_states: bool = False,
    tables: PrefillTables | None = None,
    long: LongKernel | None = None,
) -> StatePass:
    """Describe a pass.

    Args:
        common: vLLM's metadata of the pass that all kinds of layers share.
        metadata: that of one kind of state layer.
        room: of that kind's builder.
        interior: what the pass is to keep; None where passes keep nothing.
        round_states: as in `Prefills`.
        tables: for passes whose size a graph with prefills may have; None without such.
        long: for other passes that are long and keep states; None where all is ours.
    """
    decodes, rows = metadata.num_decodes, common.num_reqs
    slots = slots_of(common.block_table_tensor[:rows, 0])
    if tables is not None and tables.fit(rows, common.num_actual_tokens):
        every = replace(
            prefills_of(common, slots, 0, interior), round_states=round_states
        )
        count = common.num_actual_tokens
        held = tables.hold(every, keeps=interior is not None)
        padding = tables.padding(held, count)
        return StatePass(0, count, slots[:0], held, padding=padding)
    tokens = metadata.num_decode_tokens + metadata.num_prefill_tokens
    if not metadata.num_prefills:
        return StatePass(decodes, tokens, room.hold(slots[:decodes]), None)
    prefills = replace(
        prefills_of(common, slots, decodes, interior), round_states=round_states
    )
    if long is not None and prefills.boundary_slots is not None:
        prompts = torch.arange(decodes, rows)
        prefills = divided(long, prefills, common, prompts, interior)
    return StatePass(decodes, tokens, slots[:decodes], prefills)


def divided(
    long: LongKernel,
    prefills: Prefills,
    common: Any,
    rows: torch.Tensor,
    interior: InteriorSnapshots | None,
) -> Prefills:
    """Prompts of a pass, divided if they are long.

    What vLLM knows on the host of prompts is exact, unlike of rows that verify drafts.

    Args:
        long: for what is long.
        prefills: the prompts.
        common, interior: as for `describe`.
        rows: ``[prompts]``, on the host: their rows.
    """
    ends = common.seq_lens_cpu_upper_bound
    if ends is None:
        return prefills
    lengths = common.query_start_loc_cpu[: common.num_reqs + 1].diff()[rows]
    starts = ends[rows] - lengths
    columns = frozenset() if interior is None else interior.columns
    return long.over(prefills, starts.tolist(), lengths.tolist(), columns)


def paddings(
    most: int,
    device: torch.device,
    *,
    round_states: bool = False,
    long: LongKernel | None = None,
) -> Iterator[StatePass]:
    """Passes of padding alone, one for each way in which kernels are compiled.

    Args:
        most: sequences of a pass at most.
        device: of the tensors.
        round_states: as in `Prefills`.
        long: as for `describe`.
    """
    for count in {1, most}:
        starts = torch.arange(count + 1, dtype=torch.int32, device=device)
        slots = torch.full((count,), _PADDING, dtype=torch.int32, device=device)
        none = torch.zeros(0, dtype=torch.int32, device=device)
        yield StatePass(count, count, slots, None)
        for boundaries in (None, slots[:, None].expand(-1, COLUMNS).contiguous()):
            packed = Prefills(
                cu_seqlens=starts,
                slots=slots,
                has_initial=torch.zeros(count, dtype=torch.bool, device=device),
                offsets=torch.zeros(count, dtype=torch.int32, device=device),
                boundary_slots=boundaries,
                round_states=round_states,
            )
            yield StatePass(0, count, none, packed)
        if long is not None:
            yield _long_padding(long, packed, count)


def _long_padding(long: LongKernel, packed: Prefills, count: int) -> StatePass:
    """A pass of padding with a chunk in its first sequence: a checkpoint is written."""
    starts = packed.cu_seqlens + (CHUNK - 1)
    starts[0] = 0
    prefills = replace(packed, cu_seqlens=starts)
    lengths = [CHUNK, *[1] * (count - 1)]
    divided = divide(long.function, prefills, [0] * count, lengths, [0])
    none = packed.slots[:0]
    return StatePass(0, sum(lengths), none, replace(prefills, long=divided))


def prefills_of(
    common: Any,
    slots: torch.Tensor,
    decodes: int,
    interior: InteriorSnapshots | None,
) -> Prefills:
    """The sequences of a pass behind its decodes.

    Args:
        common, interior: as for `describe`.
        slots: ``[rows]`` of all sequences, padding counted.
        decodes: how many of them are none of these.
    """
    rows = slots.shape[0]
    computed = common.compute_num_computed_tokens()[decodes:rows]
    # Vectors of their own: kernels are compiled for how their tables are aligned.
    own = slots[decodes:].clone()
    return Prefills(
        cu_seqlens=common.query_start_loc[decodes : rows + 1] - decodes,
        slots=own,
        has_initial=computed > 0,
        offsets=computed % CHUNK,
        boundary_slots=None if interior is None else interior.rows(own),
    )


def slots_of(blocks: torch.Tensor) -> torch.Tensor:
    """Slots by what vLLM names them; it names the reserved one for padding."""
    return torch.where(blocks > 0, blocks, _PADDING)


def put(metadata: Any, state_pass: StatePass) -> None:
    """Hang a pass on vLLM's metadata of it."""
    setattr(metadata, _PASS, state_pass)


def of(metadata: Any) -> StatePass:
    """The pass that vLLM's metadata stands for.

    Raises:
        RuntimeError: if nobody described it.
    """
    found: StatePass | None = getattr(metadata, _PASS, None)
    if found is None:
        raise RuntimeError(
            "hybrid-plugin was given a forward pass that it knows nothing of: vLLM "
            f"built its {type(metadata).__name__} in a way that is not hooked. Set the "
            'option "kernels" to "engine".'
        )
    return found


def share(source: Any, target: Any, room: DecodeSlots | VerificationTables) -> None:
    """Hang the pass of one state group on the metadata of another one.

    A sequence has the same slots for all its state layers, so only the address differs.

    Args:
        source: metadata with a pass.
        target: metadata without.
        room: of the target's builder.
    """
    state_pass = of(source)
    if state_pass.prefills is not None:
        put(target, state_pass)
        return
    if isinstance(room, DecodeSlots):
        slots = room.hold(state_pass.decode_slots)
        put(target, replace(state_pass, decode_slots=slots))
    elif state_pass.verifications is not None:
        held = room.hold(state_pass.verifications)
        put(target, replace(state_pass, verifications=held))
