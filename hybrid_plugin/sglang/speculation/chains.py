# SPDX-License-Identifier: Apache-2.0
"""Blocks of drafts (DFLASH, DSPARK): what is accepted ends at the first stop.

Such a block is a chain.  SGLang's workers for them decide by themselves what of it is
accepted, each in a method of its own, and commit states, the draft model's KV and the
next step's first token by what that method returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import torch


class Chains(NamedTuple):
    """What was accepted of `N` chains of `L` tokens, the known one counted."""

    tokens: torch.Tensor
    """``[N, L]``, the token after each that was accepted; anything behind them."""
    lens: torch.Tensor
    """``[N]``, tokens that each sequence gets, at least one."""

    @property
    def last(self) -> torch.Tensor:
        """``[N]``, the token that each sequence's next step begins with."""
        column = self.lens.long() - 1
        return self.tokens.gather(1, column[:, None])[:, 0]

    def path(self) -> torch.Tensor:
        """``[N, L]``, numbers in the batch of what was accepted; -1 behind them."""
        count, width = self.tokens.shape
        numbers = torch.arange(count * width, device=self.tokens.device)
        steps = torch.arange(width, device=self.tokens.device)
        return numbers.view(count, width).masked_fill(steps >= self.lens[:, None], -1)


Cut = Callable[[Chains], Chains]
"""Ends chains at each request's first stop."""


def ended(cache: Any, batch: Any, chains: Chains) -> Chains:
    """End chains at each request's first stop, and note what is left of them.

    Args:
        cache: `HybridPrefixCache` of the requests.
        batch: SGLang's, whose drafts they are.
        chains: as SGLang accepted them.
    """
    width = chains.tokens.shape[1]
    whole = (chains.tokens.reshape(-1), chains.lens, chains.path())
    return Chains(chains.tokens, cache.drafts.sampled(batch, width, whole).lens)


def end_flash(
    outcome: tuple[Any, ...], begun: torch.Tensor, cut: Cut
) -> tuple[Any, ...]:
    """What SGLang's `DFlashWorkerV2._accept_block` returns, ended at the first stop.

    Args:
        outcome: drafts accepted, tokens gained, the last of these, all of them, and the
            lengths behind the step, which may be None.
        begun: ``[N]``, the lengths before it.
        cut: ends chains.
    """
    drafts, lens, last, tokens, _ = outcome
    chains = cut(Chains(tokens, lens))
    return (
        (chains.lens - 1).to(drafts.dtype),
        chains.lens,
        chains.last.to(last.dtype),
        tokens,
        begun + chains.lens.to(begun.dtype),
    )


def end_spark(outcome: Any, begun: torch.Tensor, cut: Cut) -> Any:
    """What SGLang's `TargetVerifyExecutor.accept_and_finalize` returns, likewise.

    Args:
        outcome: SGLang's `AcceptOuts`; its tensors may be those of a graph, which are
            left as they are.
        begun: as above.
        cut: ends chains.
    """
    chains = cut(Chains(outcome.out_tokens, outcome.commit_lens))
    return msgspec.structs.replace(
        outcome,
        correct_len=(chains.lens - 1).to(outcome.correct_len.dtype),
        bonus=chains.last.to(outcome.bonus.dtype),
        commit_lens=chains.lens,
        new_seq_lens=begun + chains.lens.to(begun.dtype),
    )
