# SPDX-License-Identifier: Apache-2.0
"""A forward pass of an engine that verifies drafts, as the mixers need it described.

Each row of vLLM's tables names a slot for every token that a sequence may verify: its
columns.  The last pass left the state after its token `t` in column `t`, with the
inputs of the convolutions, so that a sequence goes on from the column of the last token
that was accepted.  Which rows verify is known on the host, what was accepted on the
device alone, and nothing waits for it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hybrid_plugin.core.commands import CHUNK
from hybrid_plugin.device.arena import to_device
from hybrid_plugin.mixers.prefills import Prefills
from hybrid_plugin.mixers.verifications import Verifications
from hybrid_plugin.vllm.kernels.passes import StatePass, slots_of

if TYPE_CHECKING:
    from hybrid_plugin.device.interior import InteriorSnapshots

_PADDING = -1


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """What vLLM tells a builder about the drafts of a pass's rows."""

    accepted: torch.Tensor | None
    """``[rows]``, on the device: tokens accepted in the row's last pass, at least 1;
    None where none had drafts."""
    drafts: torch.Tensor | None
    """``[rows]``, on the host: drafts that the row verifies, negative where it is part
    of a prompt; None where vLLM captures a graph of rows that all verify."""


def counts_of(
    build: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> DraftCounts:
    """What a call of a builder's `build` says of drafts.

    Args:
        build: vLLM's; its parameters after the builder and two more are `args`.
        args: given by place.
        kwargs: given by name.
    """
    given = {**dict(zip(_names(build), args, strict=False)), **kwargs}
    return DraftCounts(
        given.get("num_accepted_tokens"), given.get("num_decode_draft_tokens_cpu")
    )


@functools.cache
def _names(build: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(build).parameters)[3:]


class VerificationTables:
    """Tables of the passes without prefills: a CUDA graph reads them where they were
    when it was captured.
    """

    def __init__(self, most: int, width: int, device: torch.device) -> None:
        """Room for rows, none of them there yet.

        Args:
            most: rows of a pass.
            width: tokens that a row verifies, at most.
            device: of the states.
        """

        def room(*shape: int, fill: int = _PADDING) -> torch.Tensor:
            return torch.full(shape, fill, dtype=torch.int32, device=device)

        self.width = width
        self._held = 0
        self._starts = room(most + 1, fill=0)
        self._slots, self._columns = room(most), room(most, width)

    def hold(self, verifications: Verifications) -> Verifications:
        """Put a pass's rows there; returns them, or what was given if it is too much.

        A graph of more rows than the pass has finds empty ones without slots behind
        them.
        """
        count = verifications.slots.shape[0]
        if count > self._slots.shape[0]:  # more than any graph has
            return verifications
        held = Verifications(
            self._starts[: count + 1], self._slots[:count], self._columns[:count]
        )
        held.cu_seqlens.copy_(verifications.cu_seqlens)
        held.slots.copy_(verifications.slots)
        held.columns.copy_(verifications.columns)
        behind = slice(count, self._held)
        if count < self._held:
            self._slots[behind].fill_(_PADDING)
            self._columns[behind].fill_(_PADDING)
            end = self._starts[count]
            self._starts[count + 1 : self._held + 1].copy_(end)
        self._held = count
        return held


def describe(
    common: Any,
    counts: DraftCounts,
    tables: VerificationTables,
    interior: InteriorSnapshots | None,
) -> StatePass:
    """Describe a pass.

    Args:
        common: vLLM's metadata of the pass that all kinds of layers share.
        counts: of its rows.
        tables: of the builder that describes it.
        interior: what the pass is to keep; None where passes keep nothing.
    """
    rows = common.num_reqs
    lengths = common.query_start_loc_cpu[: rows + 1].diff()
    verifying = _verifying(common, counts, lengths)
    others = ~verifying & (lengths > 0)
    blocks, starts = common.block_table_tensor[:rows], common.query_start_loc
    accepted = counts.accepted
    if not bool(others.any()):
        made = _verifications(starts[: rows + 1], blocks, accepted, tables.width)
        tokens = int(common.num_actual_tokens)
        none = slots_of(blocks[:0, 0])
        return StatePass(0, tokens, none, None, tables.hold(made), tokens)
    wanted = torch.cat([verifying.nonzero()[:, 0], others.nonzero()[:, 0]])
    count, verified = int(verifying.sum()), int(lengths[verifying].sum())
    computed, order = common.compute_num_computed_tokens()[:rows], None
    if torch.equal(wanted, torch.arange(len(wanted))):
        starts = starts[: len(wanted) + 1]
        blocks, computed = blocks[: len(wanted)], computed[: len(wanted)]
    else:
        order = to_device(_tokens_of(common, wanted), blocks.device)
        starts = to_device(_starts_of(lengths[wanted]), blocks.device)
        index = to_device(wanted, blocks.device)
        blocks, computed = blocks[index], computed[index]
        accepted = None if accepted is None else accepted[index]
    # A vector of its own: kernels are compiled for how their tables are aligned.
    slots = slots_of(blocks[count:, 0])
    return StatePass(
        0,
        int(lengths.sum()),
        slots[:0],
        Prefills(
            cu_seqlens=starts[count:] - verified,
            slots=slots,
            has_initial=computed[count:] > 0,
            offsets=computed[count:] % CHUNK,
            boundary_slots=None if interior is None else interior.rows(slots),
        ),
        _verifications(starts[: count + 1], blocks[:count], accepted, tables.width)
        if count
        else None,
        verified,
        order,
    )


def _verifying(common: Any, counts: DraftCounts, lengths: torch.Tensor) -> torch.Tensor:
    """``[rows]`` bool: which rows go on token by token.

    Rows with drafts do, and single tokens behind others: a graph of decodes may replay
    the end of a prompt, too.
    """
    rows = len(lengths)
    single = (lengths == 1) & (common.seq_lens_cpu_upper_bound[:rows] > 1)
    if counts.drafts is not None:
        return single | (counts.drafts[:rows] >= 0)
    if counts.accepted is not None:
        return torch.ones(rows, dtype=torch.bool)
    return single


def _verifications(
    starts: torch.Tensor,
    blocks: torch.Tensor,
    accepted: torch.Tensor | None,
    width: int,
) -> Verifications:
    columns = slots_of(blocks[:, :width])
    slots = columns[:, 0].contiguous()
    if accepted is not None:
        last = accepted[: len(columns), None].long() - 1
        slots = columns.gather(1, last.clamp(0, width - 1))[:, 0]
    return Verifications(starts, slots, columns)


def _starts_of(lengths: torch.Tensor) -> torch.Tensor:
    starts = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    torch.cumsum(lengths, 0, dtype=torch.int32, out=starts[1:])
    return starts


def _tokens_of(common: Any, rows: torch.Tensor) -> torch.Tensor:
    """The tokens of some rows, in their order."""
    starts = common.query_start_loc_cpu.tolist()
    spans = [torch.arange(starts[row], starts[row + 1]) for row in rows.tolist()]
    return torch.cat(spans)


def paddings(width: int, most: int, device: torch.device) -> list[StatePass]:
    """Passes of padding alone, one for each way in which kernels are compiled.

    Args:
        width: tokens that a row verifies, at most.
        most: rows of a pass.
        device: of the states.
    """
    made = []
    for count in {1, most}:
        columns = torch.full((count, width), _PADDING, dtype=torch.int32, device=device)
        starts = torch.arange(count + 1, dtype=torch.int32, device=device)
        rows = Verifications(starts, columns[:, 0].contiguous(), columns)
        made.append(StatePass(0, count, rows.slots[:0], None, rows, count))
    return made
