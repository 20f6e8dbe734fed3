# SPDX-License-Identifier: Apache-2.0
"""The slots of a sequence by column, in the block tables of vLLM's model runners.

vLLM only ever appends to a row.  Draft slots come and go, so rows are overwritten, on
every rank, before the step that reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def write_rows(
    runner: Any, groups: Sequence[int], rows: Mapping[str, list[int]], *, v2: bool
) -> None:
    """Write rows of requests that ran before and run in the step to come.

    Args:
        runner: a model runner.
        groups: places of the groups of state layers among vLLM's.
        rows: slots by column, of each request.
        v2: whether it is the V2 model runner.
    """
    write = _write_v2 if v2 else _write_v1
    for name, slots in rows.items():
        write(runner, groups, name, slots)


def _write_v1(runner: Any, groups: Sequence[int], name: str, slots: list[int]) -> None:
    """A row that is not in the batch now is made of the request's record later."""
    record = runner.requests[name].block_ids
    row = runner.input_batch.req_id_to_index.get(name)
    for group in groups:
        record[group][:] = slots
        if row is not None:
            runner.input_batch.block_table[group].add_row(slots, row)


def _write_v2(runner: Any, groups: Sequence[int], name: str, slots: list[int]) -> None:
    row = runner.req_states.req_id_to_index[name]
    for group in groups:
        runner.block_tables.block_tables[group].stage_write(row, 0, slots)
        runner.block_tables.num_blocks.np[group, row] = len(slots)
