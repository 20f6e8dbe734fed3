# SPDX-License-Identifier: Apache-2.0
"""What an adapter foresees for a model: whether it is served, and how laid out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from logging import Logger

from hybrid_plugin.config import (
    ConfigError,
    DiskOptions,
    HybridConfig,
    PeerOptions,
    StoreOptions,
)
from hybrid_plugin.core.memory.elastic_plan import ElasticPlan
from hybrid_plugin.core.memory.layout import CacheLayout, PoolSizes
from hybrid_plugin.core.tiers.host_plan import HostPlan
from hybrid_plugin.engine.sizing import EngineLimits, divide
from hybrid_plugin.tiers.peers.agent import library
from hybrid_plugin.tiers.store import mooncake


class Prospect(StrEnum):
    """What would become of a server with this model and these flags."""

    SERVED = "served"
    """By the plugin."""
    LEFT_ALONE = "left alone"
    """The engine runs its own code: the plugin has no business there."""
    REFUSED = "refused"
    """The plugin would refuse, or step aside with a warning."""
    FAILS = "fails"
    """The engine itself would not start."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """The prospect, and the numbers as far as they can be told."""

    prospect: Prospect
    reason: str = ""
    layout: CacheLayout | None = None
    sizes: PoolSizes | None = None
    """Pools of the cache memory that was given."""
    shared: ElasticPlan | None = None
    """Of pools that share their memory; `sizes` is then the most of each."""
    host: HostPlan | None = None
    """Of host memory behind the pools, if the options give some."""
    disk: DiskOptions | None = None
    """Of files behind that, likewise."""
    peers: PeerOptions | None = None
    """Of other servers that read it, likewise."""
    store: StoreOptions | None = None
    """Of a store behind it that servers share, likewise."""
    max_model_len: int = 0
    note: str = ""
    """Why there are no numbers, or what they do not say."""

    @classmethod
    def sized(
        cls,
        layout: CacheLayout,
        cache_bytes: int,
        options: HybridConfig,
        limits: EngineLimits,
        log: Logger,
        *,
        fixed_layout: CacheLayout | None = None,
        beside: int = 0,
    ) -> Outlook:
        """What becomes of a model that can be served, with so much memory.

        Args: as of `sizing.divide`.
        """
        longest = limits.max_model_len
        try:
            if options.peers is not None:
                library()
                options.peers.secret()
            if options.store is not None:
                mooncake.library()
            plan = divide(
                layout,
                cache_bytes,
                options,
                limits,
                log,
                fixed_layout=fixed_layout,
                beside=beside,
            )
        except ConfigError as error:
            shown = fixed_layout or layout
            return cls(
                Prospect.REFUSED, str(error), layout=shown, max_model_len=longest
            )
        return cls(
            Prospect.SERVED,
            layout=plan.layout,
            sizes=plan.sizes,
            shared=plan.shared,
            host=plan.host,
            disk=options.disk,
            peers=options.peers,
            store=options.store,
            max_model_len=longest,
        )
