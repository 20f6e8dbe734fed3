# SPDX-License-Identifier: Apache-2.0
"""Peers where the cache is: what requests bring of them, and what they are offered."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.engine.front_door import FrontDoor, IncomingRequest
from hybrid_plugin.engine.rank_peers import RanksWithPeers
from hybrid_plugin.tiers.failure import Failure
from hybrid_plugin.tiers.peers.params import OWN, PeerOffer, read_offer
from hybrid_plugin.tiers.peers.tier import PeerTier


class Peers:
    """The peer tier of one cache."""

    def __init__(
        self,
        ranks: RanksWithPeers,
        logger: logging.Logger,
        *,
        make: Callable[..., PeerTier] = PeerTier,
    ) -> None:
        """Nothing is offered, and nothing expected.

        Args:
            ranks: that peers reach.
            logger: the adapter's, for offers that are of no use.
            make: the tier, of the arguments of `PeerTier`.
        """
        self.tier = make(ranks.identity, ranks.host, ranks.ports, ranks.mark)
        self._logger = logger
        self._told: set[str] = set()

    def arrived(
        self, front_door: FrontDoor, request: IncomingRequest, entry: Any
    ) -> None:
        """Begin to fetch what a peer has computed of a request that has just come.

        What is of no use is told in the log, the first of each kind, and counted; the
        request computes.

        Args:
            front_door: of the cache.
            request: that is not admitted yet.
            entry: `OWN` among what came with it, any JSON value.
        """
        offer = read_offer(entry)
        if isinstance(offer, PeerOffer):
            failure = front_door.expect(request, self.tier, offer)
        else:
            failure = offer
        if failure is not None:
            self._refuse(failure)

    def offer(
        self, cache: HybridCache, namespace: Hashable, tokens: Sequence[int]
    ) -> PeerOffer | None:
        """Offer the longest prefix of a request that ended; None if there is none.

        Args:
            cache: of this tier.
            namespace: of the request.
            tokens: of it, as many as another server can resume from.
        """
        key = cache.lower_tiers.offer(namespace, tokens)
        if key is None:
            return None
        assert cache.rates is not None, "who offers has a host tier"
        measured = cache.rates.prefill_seconds_per_token
        return replace(PeerOffer.from_text(key), token_seconds=measured)

    def _refuse(self, failure: Failure) -> None:
        self.tier.stats.load_failures[failure.reason] += 1
        if failure.reason not in self._told:
            self._told.add(failure.reason)
            self._logger.warning(
                "hybrid-plugin computes a prompt that a peer has computed: %s.", failure
            )


def own_entry(params: Mapping[str, Any]) -> Any:
    """What a peer with this plugin has said in the parameters of a request.

    Args:
        params: that say that a prompt was computed elsewhere.
    """
    if OWN in params:
        return params[OWN]
    return {"format": "that of another connector"}
