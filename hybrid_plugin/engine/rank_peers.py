# SPDX-License-Identifier: Apache-2.0
"""Peers as a rank sees them: it answers them, and reads from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from hybrid_plugin.config import PeerOptions
from hybrid_plugin.device.host.copies import HostCopies
from hybrid_plugin.tiers.bundle import Layouts
from hybrid_plugin.tiers.identity import Identity
from hybrid_plugin.tiers.peers.agent import DataPlane, NixlAgent
from hybrid_plugin.tiers.peers.agents import ReadingAgents, agents_that_fit
from hybrid_plugin.tiers.peers.leases import LEASE_SECONDS, Leases
from hybrid_plugin.tiers.peers.messages import Introduction
from hybrid_plugin.tiers.peers.ranges import Range
from hybrid_plugin.tiers.peers.server import PeerServer
from hybrid_plugin.tiers.peers.source import AT_ONCE, PeerSource
from hybrid_plugin.tiers.transfers import check_rows

MakePlane: TypeAlias = Callable[[Range, bool], DataPlane]
"""Registers memory, for processes of this machine alone or for others, too."""


@dataclass(frozen=True, slots=True)
class RanksWithPeers:
    """What whoever decides for the ranks has to know of them."""

    identity: Identity
    """Of any of them."""
    host: str
    """Address at which all of them listen."""
    ports: tuple[int, ...]
    """Of each, in their order."""
    mark: str
    """A random text, equal on all ranks."""


class RankPeers:
    """What offers host rows of one rank to peers, and reads theirs."""

    def __init__(
        self,
        host: HostCopies,
        options: PeerOptions,
        identity: Identity,
        layouts: Layouts,
        *,
        lease_seconds: float = LEASE_SECONDS,
        make_plane: MakePlane | None = None,
    ) -> None:
        """Register the host memory, and listen.

        Args:
            host: memory of the rank.
            options: of peers.
            identity: of the rank.
            layouts: of its rows.
            lease_seconds: that an offer holds if nobody renews it.
            make_plane: by default one of NIXL.

        Raises:
            ConfigError: if NIXL, the secret or the address cannot be used.
        """
        check_rows(layouts, host)
        secret = options.secret()
        rank = identity.tensor_rank
        self._plane = (make_plane or _nixl)(host.region, options.is_local)
        introduction = Introduction.of(identity, layouts, self._plane.metadata)
        self.leases = Leases(lease_seconds)
        self._server = PeerServer(
            (options.host, options.port(rank)), secret, introduction, self.leases
        )
        self.source = PeerSource(self._plane, introduction, rank, secret, lease_seconds)

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._server.port

    def weights_changed(self) -> None:
        """Have nobody find anything any more: the weights are no other server's."""
        own = replace(self.source.introduction, fingerprint="")
        self.source.introduction = self._server.introduction = own
        self.leases.withdraw_all()

    def stop(self) -> None:
        """Answer nobody, and have what is being read end early."""
        self._server.close()
        self._plane.stop()

    def close(self) -> None:
        """Let go of the host memory; nobody reads any more."""
        self._plane.close()


def describe(options: PeerOptions, ports: Sequence[int]) -> str:
    """Where peers reach the ranks, in one line for the log.

    Args:
        options: of peers.
        ports: of all ranks.
    """
    listed = ", ".join(map(str, ports))
    who = "this machine" if options.is_local else "who knows the secret"
    return f"hybrid-plugin lets {who} read host memory: {options.host} port {listed}."


def _nixl(region: Range, is_local: bool) -> DataPlane:
    """Several agents on one machine; a network card moves many reads of one agent."""
    make = partial(NixlAgent, region, loopback=is_local)
    return ReadingAgents(make, agents_that_fit(AT_ONCE)) if is_local else make()
