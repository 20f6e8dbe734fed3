# SPDX-License-Identifier: Apache-2.0
"""How many sequences and cached tokens fit, by the rules of each scheme.

Every estimate is for sequences of one length.  *Running* counts how many can
run at once with nothing cached; *cached* how many prefixes of that length can
be kept, with all that resuming them takes.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from math import ceil

from hybrid_plugin.config import ConfigError
from hybrid_plugin.core.commands import Pool
from hybrid_plugin.core.memory.attention_windows import FULL_ATTENTION, live_pages
from hybrid_plugin.core.memory.layout import TooLittleMemoryError
from hybrid_plugin.core.tiers.host_plan import plan_host, rows_of
from hybrid_plugin.sizes import gib
from hybrid_plugin.tools.plan.shape import ModelShape

SGLANG_RATIO = 0.9
"""SGLang's default `mamba_full_memory_ratio`: bytes of states per byte of KV."""
SGLANG_SLOTS_PER_REQUEST = 5
"""Slots that SGLang counts for a running request: three, and two to track in."""
VLLM_ALIGNED_STATES = 2
"""Blocks of states that vLLM holds for a running request with prefix caching."""
SGLANG_VERIFYING = 48
"""Requests that SGLang lets run with speculation.  Its scratch has a row for each, and
one more: the states behind the drafts and behind the token before them."""
VLLM_LEAST_BLOCK = 16
"""Tokens that vLLM's block size is a multiple of, where the backend allows it."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What one scheme makes of the memory."""

    scheme: str
    running: int
    """Sequences that run at once."""
    cached_sequences: int
    """Prefixes that are kept and can be resumed, with nothing running."""
    cached_tokens: int
    """Tokens of these."""
    unit: int
    """Tokens that a hit is rounded down to."""
    steps: tuple[str, ...]
    """The arithmetic, line by line."""


def two_pools(
    shape: ModelShape, budget: int, length: int, page_size: int, drafts: int = 0
) -> Estimate:
    """Pages and slots in pools of their own, by this package; slots alone for a model
    that keeps nothing else.

    Drafts take nothing from sequences in vLLM: slots are lent for them where nobody
    waits.  In SGLang each that runs takes a row of states besides.
    """
    layout = shape.layout(page_size)
    pages = layout.pages_for(length)
    window_bytes = sum(
        len(live_pages(window, length, page_size)) * size
        for window, size in zip(
            layout.attention_windows, layout.window_page_bytes, strict=True
        )
    )
    one = pages * layout.page_bytes + layout.slot_bytes + window_bytes
    # The reserved page and slot.
    usable = budget - layout.page_bytes - layout.slot_bytes
    count = max(usable // max(one, 1), 0)
    alone = layout.has_states_alone
    parts = [] if alone else [f"{pages} pages x {gib(layout.page_bytes)}"]
    if layout.slot_bytes:
        parts.append(f"1 slot x {gib(layout.slot_bytes)}")
    if window_bytes:
        parts.append(f"{gib(window_bytes)} in windows")
    steps = [
        "no layer attends: there is no KV, and states have all the memory"
        if alone
        else f"a page of {page_size} tokens: {gib(layout.page_bytes)}",
        f"a sequence: {' + '.join(parts)} = {gib(one)}",
        f"{gib(usable)} (less the reserved ids) / {gib(one)} = {count}",
    ]
    if drafts and layout.slot_bytes:
        row = (1 + drafts) * layout.slot_bytes
        rows = max(usable // (one + row), 0)
        steps.append(
            f"{drafts} drafts in SGLang, elastic pools: a row of {gib(row)} for each "
            f"that runs, {gib(usable)} / {gib(one + row)} = {rows} sequences"
        )
        verifying = one + drafts * layout.slot_bytes
        at_once = max(usable // verifying, 0)
        steps.append(
            f"{drafts} drafts in vLLM: {drafts} x {gib(layout.slot_bytes)} lent where "
            f"there is room, {gib(usable)} / {gib(verifying)} = {at_once} sequences; "
            "beyond that some decode without drafts"
        )
    if drafts and shape.record_bytes:
        record = (1 + drafts) * shape.record_bytes
        steps.append(
            f"with draft_states replay: no slot, and {1 + drafts} x "
            f"{gib(shape.record_bytes)} = {gib(record)} beside the pools for each "
            "sequence that may run"
        )
    scheme = "states alone" if alone else "two pools"
    return Estimate(scheme, count, count, count * length, page_size, tuple(steps))


@dataclass(frozen=True, slots=True)
class AlignedBlocks:
    """vLLM's one pool of equal blocks, for a model and a budget."""

    unit: int
    """Tokens of a block."""
    blocks: int
    """That can be used."""
    block_bytes: int
    group: int
    """Layers in a group; a block holds one group's share."""
    full: int
    """Blocks that `unit` tokens take in layers of full attention."""
    states: int
    """Blocks that the states of a sequence take."""


def aligned_blocks(shape: ModelShape, budget: int) -> AlignedBlocks:
    """How vLLM divides its memory (0.32, with prefix caching).

    `_align_hybrid_block_size` raises the attention block until a state fits
    into it; layers are grouped by the smallest number of alike layers, and a
    block holds one group's share.
    """
    per_token = max(group.token_bytes for group in shape.attention)
    state = max((group.state_bytes for group in shape.states), default=0)
    unit = VLLM_LEAST_BLOCK
    block = unit * max(ceil(state / (unit * per_token)), 1)
    counts = [group.count for group in shape.attention]
    size = group_size(counts + [group.count for group in shape.states])
    block_bytes = size * block * per_token
    full = sum(
        ceil(group.count / size)
        for group in shape.attention
        if group.window == FULL_ATTENTION
    )
    states = sum(ceil(group.count / size) for group in shape.states)
    blocks = budget // block_bytes - 1
    return AlignedBlocks(block, blocks, block_bytes, size, full, states)


@dataclass(frozen=True, slots=True)
class StaticPools:
    """SGLang's two pools, by its fixed ratio."""

    slots: int
    """That can be used."""
    tokens: int
    """Room for KV."""
    state_bytes: int
    """Of all slots."""


def static_pools(shape: ModelShape, budget: int, page_size: int) -> StaticPools:
    """How SGLang divides its memory (0.5.23)."""
    state = shape.state_bytes
    share = SGLANG_RATIO / (1 + SGLANG_RATIO)
    slots = int(budget * share) // state - 1 if state else 0
    taken = (slots + 1) * state
    tokens = (budget - taken) // max(shape.token_bytes, 1) // page_size * page_size
    return StaticPools(slots, tokens, taken)


def vllm_aligned(
    shape: ModelShape, budget: int, length: int, drafts: int = 0
) -> Estimate:
    """One pool of equal blocks, by vLLM's rules; a state more for each draft."""
    per_token = max(group.token_bytes for group in shape.attention)
    state = max((group.state_bytes for group in shape.states), default=0)
    pool = aligned_blocks(shape, budget)
    unit, block, blocks = VLLM_LEAST_BLOCK, pool.unit, pool.blocks
    size, full, states = pool.group, pool.full, pool.states
    block_bytes = pool.block_bytes
    windows = sum(
        ceil(group.count / size) * len(live_pages(group.window, length, block))
        for group in shape.attention
        if group.window != FULL_ATTENTION
    )
    row = ceil(length / block)
    rows = VLLM_ALIGNED_STATES + drafts
    held = full * row + windows + rows * states
    kept = length // block
    cached = full * kept + windows + states
    running = max(blocks // held, 0)
    sequences = max(blocks // cached, 0) if kept else 0
    steps = (
        f"a block: {unit} x ceil({state:,} state bytes / ({unit} x {per_token:,} KV "
        f"bytes)) = {block} tokens",
        f"groups of {size} layers: {full} of full attention, {states} of states; "
        f"a block is {size} x {block} x {per_token:,} = {gib(block_bytes)}",
        f"{gib(budget)} / {gib(block_bytes)} = {blocks} blocks, the null block not "
        "counted",
        f"running: {full} x ceil({length} / {block}) + {rows} x "
        f"{states}"
        + (f" + {windows} in windows" if windows else "")
        + f" = {held} blocks a sequence, {blocks} / {held} = {running}",
        f"cached: whole blocks only, {full} x {kept} + {states} = {cached} blocks, "
        f"{sequences} sequences of {kept * block} tokens",
    )
    return Estimate(
        "vLLM, aligned blocks",
        running,
        sequences,
        sequences * kept * block,
        block,
        steps,
    )


def sglang_static(
    shape: ModelShape, budget: int, length: int, page_size: int, drafts: int = 0
) -> Estimate:
    """A fixed ratio of the two pools, by SGLang's rules (0.5.23).

    With drafts, what is left by the scratch that they are verified in.
    """
    state, token = shape.state_bytes, shape.token_bytes
    scratch = (SGLANG_VERIFYING + 1) * (drafts + 1) * state if drafts else 0
    whole, budget = budget, max(budget - scratch, 0)
    pools = static_pools(shape, budget, page_size)
    slots, tokens, rest = pools.slots, pools.tokens, budget - pools.state_bytes
    by_slots = slots // SGLANG_SLOTS_PER_REQUEST if state else tokens
    padded = ceil(length / page_size) * page_size
    running = max(min(by_slots, tokens // padded), 0)
    if drafts:
        running = min(running, SGLANG_VERIFYING)
    cached = max(min(slots, tokens // padded), 0) if state else tokens // padded
    by_kv = f"{tokens:,} / {padded} tokens = {tokens // padded}"
    steps: tuple[str, ...] = (
        f"KV: {gib(rest)} / {token:,} bytes = {tokens:,} tokens",
        by_kv,
    )
    if state:
        steps = (
            f"states: {gib(budget)} x {SGLANG_RATIO} / {1 + SGLANG_RATIO} / "
            f"{gib(state)} - 1 = {slots} slots",
            steps[0],
            f"running: min({slots} / {SGLANG_SLOTS_PER_REQUEST} slots a request = "
            f"{by_slots}, {by_kv}) = {running}",
            f"cached: min({slots} slots, {tokens // padded} by KV) = {cached}",
        )
    if scratch:
        steps = (
            f"scratch: {SGLANG_VERIFYING + 1} x {drafts + 1} states x {gib(state)} = "
            f"{gib(scratch)} of {gib(whole)}, and at most {SGLANG_VERIFYING} run",
            *steps,
        )
    return Estimate(
        "SGLang, static ratio", running, cached, cached * length, page_size, steps
    )


def group_size(counts: list[int]) -> int:
    """Layers in a group, by vLLM's `_get_kv_cache_groups_uniform_page_size`."""
    least, most = min(counts), max(counts)
    return most if most < least * 1.5 else least


def host_memory(
    shape: ModelShape, budget: int, length: int, page_size: int
) -> Estimate:
    """What is kept in host memory when the device evicts it; nothing runs there.

    Raises:
        ConfigError: if it holds nothing.
    """
    layout = shape.layout(page_size)
    try:
        plan = plan_host(rows_of(layout), budget)
    except (TooLittleMemoryError, ValueError) as error:
        raise ConfigError(f"--host-memory: {error}.") from error
    rows = {Pool.KV: layout.pages_for(length), Pool.STATE: 1}
    for index, window in enumerate(layout.attention_windows):
        rows[Pool.window(index)] = len(live_pages(window, length, page_size))
    rows = {pool: count for pool, count in rows.items() if pool in plan.row_bytes}

    def blocks(sequences: int) -> int:
        # Row 0 of each pool is nobody's.
        return sum(
            -(-(1 + sequences * count) // plan.rows_per_block(pool))
            for pool, count in rows.items()
        )

    most = plan.budget // max(plan.bytes_of(rows), 1) + 1
    count = bisect_right(range(1, most + 1), plan.blocks, key=blocks)
    steps = (
        f"{plan.blocks} blocks of {gib(plan.block_bytes)}, each of "
        + ", ".join(
            f"{plan.rows_per_block(pool)} {Pool.noun(pool)} of {pool}" for pool in rows
        ),
        f"{count} sequences of {gib(plan.bytes_of(rows))} take {blocks(count)} blocks",
    )
    return Estimate("host memory", 0, count, count * length, page_size, steps)
