# SPDX-License-Identifier: Apache-2.0
"""A forward pass of an engine that verifies drafts, as the mixers need it described.

Each row of vLLM's tables names a slot for every token that a sequence may verify: its
columns.  The last pass left the state after its token `t` in column `t`, with the
inputs of the convolutions, so that a sequence goes on from the column of the last token
that was accepted.  Which rows verify is known on the host, what was accepted on the
device alone, and nothing waits for it.

Where passes record what the tokens do instead, a sequence has one slot, and what was
accepted of the last pass is in it when the next one begins (`DraftRecords`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from hybrid_plugin.core.commands import CHUNK
from hybrid_plugin.device.arena import to_device
from hybrid_plugin.mixers.long_prefill import LongKernel
from hybrid_plugin.mixers.prefills import Prefills
from hybrid_plugin.mixers.state_pass import StatePass
from hybrid_plugin.mixers.verifications import Verifications
from hybrid_plugin.vllm.kernels.fixed_shape import PrefillTables
from hybrid_plugin.vllm.kernels.passes import divided, prefills_of, slots_of
from hybrid_plugin.vllm.kernels.verification_tables import VerificationTables

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


def describe(
    common: Any,
    counts: DraftCounts,
    tables: VerificationTables,
    interior: InteriorSnapshots | None,
    prompts: PrefillTables | None = None,
    long: LongKernel | None = None,
) -> StatePass:
    """Describe a pass.

    Args:
        common: vLLM's metadata of the pass that all kinds of layers share.
        counts: of its rows.
        tables: of the builder that describes it.
        interior: what the pass is to keep; None where passes keep nothing.
        prompts: for passes whose shape a graph with prefills has; None without such.
        long: for long prompts of other passes; None where all is ours.
    """
    rows = common.num_reqs
    if prompts is not None and prompts.fit(rows, common.num_actual_tokens):
        return _of_a_graph(common, counts, tables, interior, prompts)
    lengths = common.query_start_loc_cpu[: rows + 1].diff()
    verifying = _verifying(common, counts, lengths)
    others = ~verifying & (lengths > 0)
    blocks, starts = common.block_table_tensor[:rows], common.query_start_loc
    accepted = counts.accepted
    if not bool(others.any()):
        # What a graph pads beyond all requests that there may be has no tokens.
        rows = min(rows, tables.most)
        made = _verifications(starts[: rows + 1], blocks[:rows], accepted, tables)
        held, tokens = tables.hold(made), int(common.num_actual_tokens)
        if tables.records is not None:
            tables.records.recorded(held.slots)
        return StatePass(0, tokens, held.slots[:0], None, held, tokens)
    wanted = torch.cat([verifying.nonzero()[:, 0], others.nonzero()[:, 0]])
    count, verified = int(verifying.sum()), int(lengths[verifying].sum())
    computed, order = common.compute_num_computed_tokens()[:rows], None
    index = None
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
    made = _verifications(starts[: count + 1], blocks[:count], accepted, tables)
    if tables.records is not None:
        chosen = None if index is None else index[:count]
        tables.records.recorded(made.slots if count else None, chosen)
    prefills = Prefills(
        cu_seqlens=starts[count:] - verified,
        slots=slots,
        has_initial=computed[count:] > 0,
        offsets=computed[count:] % CHUNK,
        boundary_slots=None if interior is None else interior.rows(slots),
    )
    if long is not None:
        prefills = divided(long, prefills, common, wanted[count:], interior)
    return StatePass(
        0,
        int(lengths.sum()),
        slots[:0],
        prefills,
        made if count else None,
        verified,
        order,
    )


def _of_a_graph(
    common: Any,
    counts: DraftCounts,
    tables: VerificationTables,
    interior: InteriorSnapshots | None,
    prompts: PrefillTables,
) -> StatePass:
    """A pass in the shape of a graph that replays prompts and drafts alike.

    Every row is in both tables, with a slot in one of them.
    """
    rows, starts = common.num_reqs, common.query_start_loc
    lengths = common.query_start_loc_cpu[: rows + 1].diff()
    blocks = common.block_table_tensor[:rows]
    verifying = to_device(_verifying(common, counts, lengths), blocks.device)
    made = _verifications(starts[: rows + 1], blocks, counts.accepted, tables)
    verified = replace(made, slots=torch.where(verifying, made.slots, _PADDING))
    held = tables.hold(verified)
    if tables.records is not None:
        tables.records.recorded(held.slots)
    slots = torch.where(verifying, _PADDING, slots_of(blocks[:, 0]))
    packed = prefills_of(common, slots, 0, interior)
    tokens = int(common.num_actual_tokens)
    return StatePass(
        0,
        tokens,
        slots[:0],
        prompts.hold(packed, keeps=interior is not None),
        held,
        tokens,
        same_rows=True,
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
    tables: VerificationTables,
) -> Verifications:
    if tables.records is not None:
        return Verifications(starts, slots_of(blocks[:, 0]), None)
    columns = slots_of(blocks[:, : tables.width])
    slots = columns[:, 0].contiguous()
    if accepted is not None:
        last = accepted[: len(columns), None].long() - 1
        slots = columns.gather(1, last.clamp(0, tables.width - 1))[:, 0]
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


def paddings(
    width: int, most: int, device: torch.device, *, recorded: bool
) -> list[StatePass]:
    """Passes of padding alone, one for each way in which kernels are compiled.

    Args:
        width: tokens that a row verifies, at most.
        most: rows of a pass.
        device: of the states.
        recorded: whether passes record what tokens do.
    """
    made = []
    for count in {1, most}:
        columns = torch.full((count, width), _PADDING, dtype=torch.int32, device=device)
        starts = torch.arange(count + 1, dtype=torch.int32, device=device)
        slots = columns[:, 0].contiguous()
        rows = Verifications(starts, slots, None if recorded else columns)
        made.append(StatePass(0, count, rows.slots[:0], None, rows, count))
    return made
