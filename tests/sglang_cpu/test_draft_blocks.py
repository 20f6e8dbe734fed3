# SPDX-License-Identifier: Apache-2.0
"""Drafts of whole blocks on the CPU platform."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.speculative.dflash_info import DFlashVerifyInput

from hybrid_plugin.sglang_cpu import draft_attention, draft_blocks, torch_shims

ROWS, LENGTH, VOCABULARY = 6_000, 3, 4


def accepted(
    target: torch.Tensor, drafted: torch.Tensor, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens ``[rows, LENGTH]`` and how many of them count, of many equal rows.

    Args:
        target: ``[LENGTH, VOCABULARY]``, what the model says behind each token.
        drafted: ``[LENGTH - 1, VOCABULARY]``, what drafts are drawn from.
        seed: of all chances.
    """
    torch.manual_seed(seed)
    drafts = torch.multinomial(drafted, ROWS, replacement=True).T
    candidates = torch.cat([torch.zeros(ROWS, 1, dtype=torch.long), drafts], 1)
    numbers = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH)
    predicts = torch.full((ROWS * LENGTH,), -1, dtype=torch.int32)
    index = torch.full((ROWS, LENGTH), -1, dtype=torch.int32)
    count = torch.empty(ROWS, dtype=torch.int32)
    draft_blocks.accept_chain(
        predicts,
        index,
        count,
        candidates,
        numbers,
        torch.empty(0),
        torch.empty(0),
        torch.rand(ROWS, LENGTH - 1),
        torch.rand(ROWS),
        target.expand(ROWS, -1, -1),
        drafted.expand(ROWS, -1, -1),
        1.0,
        1.0,
    )
    tokens = predicts.view(ROWS, LENGTH)
    for row in range(0, ROWS, 997):
        kept = int(count[row]) + 1
        assert index[row, :kept].tolist() == numbers[row, :kept].tolist()
        assert (index[row, kept:] == -1).all() and (tokens[row, kept:] == -1).all()
        assert tokens[row, : kept - 1].tolist() == drafts[row, : kept - 1].tolist()
    return tokens, count + 1


def test_chains_are_distributed_as_the_model_says() -> None:
    """Whatever the drafts are drawn from."""
    target = torch.tensor([[0.5, 0.3, 0.2, 0], [0.1, 0.2, 0.3, 0.4], [0.25] * 4])
    drafted = torch.tensor([[0.1, 0.6, 0.2, 0.1], [0.4, 0.3, 0.2, 0.1]])
    tokens, lens = accepted(target, drafted)
    assert lens.unique().tolist() == [1, 2, 3]
    for place in range(LENGTH):
        found = tokens[lens > place, place].long().bincount(minlength=VOCABULARY)
        share = found / found.sum()
        torch.testing.assert_close(share, target[place], atol=0.03, rtol=0)


def test_drafts_that_are_what_the_model_says_are_all_kept() -> None:
    target = torch.tensor([[0.5, 0.3, 0.2, 0], [0.1, 0.2, 0.3, 0.4], [0.25] * 4])
    _, lens = accepted(target, target[:-1])
    assert lens.unique().tolist() == [LENGTH]


def test_blocks_are_not_verified_as_blocks() -> None:
    nothing: Any = torch.empty(0)
    with pytest.raises(NotImplementedError, match="one by one"):
        draft_blocks.accept_chain(*[nothing] * 11, 1.0, 1.0, block_verification=True)


@pytest.mark.parametrize("is_block", [True, False])
def test_drafts_of_a_block_see_each_other(is_block: bool) -> None:
    drafts = DFlashVerifyInput(
        draft_token=torch.empty(0, dtype=torch.long),
        positions=torch.empty(0, dtype=torch.long),
        draft_token_num=LENGTH,
    )
    batch = SimpleNamespace(spec_info=drafts, seq_lens=torch.tensor([5, 0]))
    kinds = (AttentionType.DECODER, AttentionType.ENCODER_ONLY)
    layer = SimpleNamespace(attn_type=kinds[is_block])
    mask = draft_attention._mask(layer, batch)
    expected = torch.ones(2, LENGTH, LENGTH, dtype=torch.bool)
    assert torch.equal(mask, expected if is_block else expected.tril())
    if is_block:
        drafts.custom_mask = torch.ones(1, dtype=torch.bool)
        with pytest.raises(NotImplementedError, match="has no mask"):
            draft_attention._mask(layer, batch)


def test_dspark_is_taken_on_a_device_that_it_does_not_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sglang.srt.arg_groups import speculative_hook

    seen = []

    def handle(server_args: Any) -> None:
        view = speculative_hook.resolving_view(server_args)
        seen.append((view.device, view.pp_size))

    def view_of(given: Any) -> Any:
        return given

    monkeypatch.setattr(speculative_hook, "_handle_dspark", handle)
    monkeypatch.setattr(speculative_hook, "resolving_view", view_of)
    for _ in range(2):
        draft_blocks.take_dspark()
    speculative_hook._handle_dspark(SimpleNamespace(device="cpu", pp_size=3))
    assert seen == [("xpu", 3)]
    assert speculative_hook.resolving_view is view_of


def test_tensors_of_a_cpu_are_told_of_no_stream() -> None:
    torch_shims.record_no_streams()
    torch.zeros(1).record_stream(torch.cpu.current_stream())
