# SPDX-License-Identifier: Apache-2.0
"""Blocks of drafts: what SGLang's workers accept ends where the request does."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_context
from sglang.srt.speculative.dspark_components.dspark_verify import AcceptOuts

from hybrid_plugin.sglang.speculation.chains import Chains, end_flash, end_spark
from hybrid_plugin.sglang.speculation.workers import with_commands
from tests.sglang.test_draft_steps import WIDTH, Decoding

TOKENS = torch.tensor([[5, 6, 7, 8], [5, 9, 0, 0]])
"""After each token of two chains; of the second one two count."""
LENS = torch.tensor([4, 2], dtype=torch.int32)
BEGUN = torch.tensor([10, 20])


@pytest.fixture(autouse=True)
def configured() -> Iterator[None]:
    with get_context().override_server_args(speculative_algorithm="DFLASH"):
        yield


def test_a_chain_is_a_path() -> None:
    chains = Chains(TOKENS, LENS)
    assert chains.path().tolist() == [[0, 1, 2, 3], [4, 5, -1, -1]]
    assert chains.last.tolist() == [8, 9]


def to_two(chains: Chains) -> Chains:
    return chains._replace(lens=chains.lens.clamp(max=2))


def test_what_dflash_accepts_is_ended() -> None:
    outcome = (LENS - 1, LENS, torch.tensor([8, 9]), TOKENS, None)
    drafts, lens, last, tokens, behind = end_flash(outcome, BEGUN, to_two)
    assert drafts.tolist() == [1, 1] and drafts.dtype == torch.int32
    assert lens.tolist() == [2, 2] and lens.dtype == torch.int32
    assert last.tolist() == [6, 9] and last.dtype == torch.int64
    assert behind.tolist() == [12, 22] and behind.dtype == torch.int64
    assert tokens is TOKENS


def test_what_dspark_accepts_is_ended_and_the_buffers_of_a_graph_stay() -> None:
    whole = AcceptOuts(
        correct_len=(LENS - 1).long(),
        bonus=torch.tensor([8, 9]),
        cap_trim_lens=torch.zeros(2, dtype=torch.int32),
        commit_lens=LENS,
        new_seq_lens=BEGUN + LENS,
        out_tokens=TOKENS,
    )
    found = end_spark(whole, BEGUN, to_two)
    assert found.correct_len.tolist() == [1, 1]
    assert found.correct_len.dtype == torch.int64
    assert found.bonus.tolist() == [6, 9]
    assert found.commit_lens.tolist() == [2, 2]
    assert found.new_seq_lens.tolist() == [12, 22]
    assert whole.commit_lens.tolist() == [4, 2] and whole.bonus.tolist() == [8, 9]


class Flash:
    """As much of SGLang's worker as accepts a block."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self.tokens = tokens
        self.outcome: Any = None

    def forward_batch_generation(self, batch: Any) -> Any:
        batch.forward_mode = ForwardMode.TARGET_VERIFY  # as SGLang's does
        self.outcome = self._accept_block(prefix_lens=batch.seq_lens)
        return SimpleNamespace(speculative_num_draft_tokens=self.tokens.shape[1])

    def _accept_block(self, *, prefix_lens: torch.Tensor) -> Any:
        lens = torch.full((len(self.tokens),), self.tokens.shape[1], dtype=torch.int32)
        return lens - 1, lens, self.tokens[:, -1], self.tokens, None


class Spark:
    """As much of SGLang's worker as has a verifier."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self._verify_executor: Any = SimpleNamespace(accept_and_finalize=self._accept)
        self.tokens = tokens
        self.outcome: Any = None

    def forward_batch_generation(self, batch: Any) -> Any:
        self.outcome = self._verify_executor.accept_and_finalize(
            prefix_lens=batch.seq_lens
        )
        return SimpleNamespace(speculative_num_draft_tokens=self.tokens.shape[1])

    def _accept(self, *, prefix_lens: torch.Tensor) -> AcceptOuts:
        lens = torch.full((len(self.tokens),), self.tokens.shape[1], dtype=torch.int32)
        zeros = torch.zeros_like(lens)
        return AcceptOuts(
            correct_len=lens - 1,
            bonus=self.tokens[:, -1],
            cap_trim_lens=zeros,
            commit_lens=lens,
            new_seq_lens=prefix_lens + lens,
            out_tokens=self.tokens,
        )


def step_of(worker: Any, reqs: list[Req], cache: Any) -> Any:
    lengths = [len(req.origin_input_ids) + len(req.output_ids) - 1 for req in reqs]
    batch: Any = SimpleNamespace(
        reqs=reqs,
        tree_cache=cache,
        forward_mode=ForwardMode.DECODE,
        seq_lens=torch.tensor(lengths),
    )
    worker.forward_batch_generation(batch)
    return worker.outcome


@pytest.mark.parametrize("kind", [Flash, Spark])
def test_workers_of_blocks_end_at_a_stop_and_tell_the_core(kind: type) -> None:
    """One request stops at its second new token; the next step begins there."""
    bench = Decoding()
    reqs = bench.begin("a", "b")
    reqs[0].sampling_params.stop_token_ids = {31}
    tokens = torch.tensor([[30, 31, 32, 33], [40, 41, 42, 43]])
    outcome = step_of(with_commands(kind)(tokens), reqs, bench.cache)
    if kind is Flash:
        lens, last, behind = outcome[1], outcome[2], outcome[4]
    else:
        lens, last = outcome.commit_lens, outcome.bonus
        behind = outcome.new_seq_lens
    assert lens.tolist() == [2, WIDTH]
    assert last.tolist() == [31, 43]
    begun = [len(req.origin_input_ids) for req in reqs]
    assert behind.tolist() == [begun[0] + 2, begun[1] + WIDTH]
    assert bench.core.is_verifying(bench.cache.name(reqs[0]))


@pytest.mark.parametrize("kind", [Flash, Spark])
def test_workers_of_another_cache_are_left_alone(kind: type) -> None:
    tokens = torch.tensor([[30, 31, 32, 33]])
    req: Any = SimpleNamespace(origin_input_ids=[1], output_ids=[2])
    outcome = step_of(with_commands(kind)(tokens), [req], object())
    assert (outcome[1] if kind is Flash else outcome.commit_lens).tolist() == [WIDTH]
