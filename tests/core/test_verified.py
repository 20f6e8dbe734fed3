# SPDX-License-Identifier: Apache-2.0
"""States that verifying steps leave, on real tensors."""

from __future__ import annotations

import pytest
import torch

from hybrid_plugin.core.commands import Command, MoveWindow, Pool, Take
from hybrid_plugin.device.arena import Arena
from hybrid_plugin.device.executor import Executor
from hybrid_plugin.device.verified import RollingWindows, VerificationScratch
from tests.core.support import state, zero

SLOTS, TOKENS, WIDTH, CHANNELS = 6, 5, 3, 2


def numbered(*shape: int) -> torch.Tensor:
    """A tensor in which every element is another."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def move(source: int, offset: int, destination: int) -> MoveWindow:
    return MoveWindow(Pool.STATE, source, offset, destination)


def take(row: int, step: int, destination: int) -> Take:
    return Take(Pool.STATE, row, step, destination)


def executor(windows: list[torch.Tensor]) -> Executor:
    runs = Executor({})
    runs.windows = RollingWindows(windows, WIDTH)
    return runs


def test_a_window_moves_to_the_start_of_another_slot_and_nothing_else_does() -> None:
    channels_last = numbered(SLOTS, TOKENS, CHANNELS)
    channels_first = numbered(SLOTS, CHANNELS, TOKENS)
    expected = channels_last.clone(), channels_first.clone()
    executor([channels_last, channels_first.transpose(1, 2)]).run(
        [move(1, 2, 3), move(4, 1, 5)]
    )
    for source, offset, destination in ((1, 2, 3), (4, 1, 5)):
        tokens = slice(offset, offset + WIDTH)
        expected[0][destination, :WIDTH] = expected[0][source, tokens]
        expected[1][destination, :, :WIDTH] = expected[1][source, :, tokens]
    assert torch.equal(channels_last, expected[0])
    assert torch.equal(channels_first, expected[1])


def test_windows_move_in_the_order_of_all_commands() -> None:
    windows = numbered(SLOTS, TOKENS, CHANNELS)
    before = windows.clone()
    slots = Executor({Pool.STATE: Arena([windows.view(torch.int8).flatten(1)])})
    slots.windows = RollingWindows([windows], WIDTH)
    commands: list[Command] = [move(1, 2, 3), zero(1), move(3, 0, 2), state(3, 4)]
    slots.run(commands)
    assert not windows[1].any()
    assert torch.equal(windows[2, :WIDTH], before[1, 2 : 2 + WIDTH])
    assert torch.equal(windows[4], windows[3])


def test_inputs_beyond_a_window_are_refused_before_anything_moves() -> None:
    narrow, wide = numbered(SLOTS, TOKENS, 1), numbered(SLOTS, TOKENS + 1, 1)
    before = wide.clone()
    with pytest.raises(ValueError, match="a window of 5 tokens was read up to 6"):
        executor([wide, narrow]).run([move(1, 0, 2), move(3, 3, 4)])
    assert torch.equal(wide, before)
    with pytest.raises(ValueError, match="fewer than 3 inputs"):
        RollingWindows([numbered(SLOTS, 2, 1)], WIDTH)


def test_a_state_is_taken_whole() -> None:
    rows, steps = 4, 3
    scratch, slots = numbered(rows, steps, 2, 2), torch.zeros(SLOTS, 2, 2)
    chain, windows = numbered(rows, TOKENS, CHANNELS), torch.zeros(SLOTS, WIDTH, 2)
    tree, dense = numbered(rows, steps, WIDTH), torch.zeros(SLOTS, WIDTH)
    runs = Executor({})
    runs.scratch = VerificationScratch(
        [(scratch, slots), (tree, dense)], [(chain, windows)]
    )
    runs.run([take(3, 2, 1), take(0, 1, 5)])
    for row, step, slot in ((3, 2, 1), (0, 1, 5)):
        assert torch.equal(slots[slot], scratch[row, step])
        assert torch.equal(dense[slot], tree[row, step])
        assert torch.equal(windows[slot], chain[row, step : step + WIDTH])
    others = [0, 2, 3, 4]
    assert not slots[others].any() and not windows[others].any()


def test_a_scratch_of_other_shapes_is_refused() -> None:
    fits, rows = numbered(2, TOKENS, CHANNELS), numbered(SLOTS, WIDTH, CHANNELS)
    VerificationScratch([], [(fits, rows)])
    with pytest.raises(ValueError, match="no state of a slot"):
        VerificationScratch([(fits, rows)])
    for wrong in (numbered(2, TOKENS, 1), numbered(2, WIDTH - 1, CHANNELS)):
        with pytest.raises(ValueError, match="none of a slot"):
            VerificationScratch([], [(wrong, rows)])


def test_where_nothing_is_verified_nothing_can_be_taken() -> None:
    with pytest.raises(TypeError, match="no convolution windows move here"):
        Executor({}).run([move(1, 0, 2)])
    with pytest.raises(TypeError, match="verifications write no scratch here"):
        Executor({}).run([take(1, 0, 2)])
