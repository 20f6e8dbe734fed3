# SPDX-License-Identifier: Apache-2.0
"""What tiers behind the host take of SGLang's steps: reports, and time while it idles.

Ranks finish writes and fetches at different times.  So in each round of the scheduler
in which any are out, all ranks agree on which of them all have done.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from typing import Any

import torch
from sglang.srt.runtime_context import get_parallel

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.engine.outer_side import OuterSide
from hybrid_plugin.engine.peers import Peers
from hybrid_plugin.engine.rank_tiers import RankTiers
from hybrid_plugin.engine.session_desk import Answer
from hybrid_plugin.engine.store import Store
from hybrid_plugin.sglang.requests import namespace

WAIT_SECONDS = 1e-3
"""What a round without anything to run waits at most for a write or fetch: a request
that comes meanwhile waits as long, and the round costs far less."""


class OuterSteps:
    """The rounds of one scheduler."""

    def __init__(
        self, cache: HybridCache, rank: RankTiers, outer: OuterSide, mark: str
    ) -> None:
        """Nothing is out.

        Args:
            cache: with something behind its host tier.
            rank: what moves bundles of this rank.
            outer: what is behind, as the cache sees it.
            mark: a random text, equal on all ranks.
        """
        self._cache = cache
        self._rank = rank
        self._outer = outer
        self._mark = mark
        self._updates = count(1)

    @property
    def is_busy(self) -> bool:
        """Whether anything is on its way, or will be with the next commands."""
        ordered = self._outer.is_busy
        return bool(
            self._cache.lower_tiers.fetching
            or self._cache.lower_tiers.writing
            or ordered
        )

    @property
    def peers(self) -> Peers | None:
        """Other servers, where there are any."""
        return self._outer.peers

    @property
    def store(self) -> Store | None:
        """What servers share, where there is such."""
        return self._outer.store

    def settle(self) -> None:
        """Report what all ranks have done; all of them call it once in each round."""
        self._outer.take(self._rank.settle())
        self._outer.step()

    def take_session_order(self, order: Mapping[str, Any]) -> Answer:
        """Take an order about saved sessions; all ranks take the same at once."""
        space = namespace(order.get("extra_key"), order.get("salt"))
        return self._outer.take_session_order(order, space)

    def wait(self) -> None:
        """Let time pass where nothing runs: what is out may be done by then."""
        if self.is_busy:
            self._rank.wait(WAIT_SECONDS)

    def weights_change(self) -> None:
        """Note that weights are other ones from now on than those that were loaded.

        No server will have them again, so neither will it find what they leave.
        """
        self._rank.weights_changed()
        self._outer.renew(f"{self._mark} {next(self._updates)}")


def greatest_of_all_ranks(own: list[int]) -> list[int]:
    """The greatest of each number among the ranks that call this at once."""
    parallel = get_parallel()
    if parallel.tp_size == 1:
        return own
    numbers = torch.tensor(own, dtype=torch.int64)
    torch.distributed.all_reduce(
        numbers,
        op=torch.distributed.ReduceOp.MAX,
        group=parallel.tp_group.cpu_group,
    )
    found: list[int] = numbers.tolist()
    return found
