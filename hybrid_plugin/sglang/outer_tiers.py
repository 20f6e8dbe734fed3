# SPDX-License-Identifier: Apache-2.0
"""What is behind the host memory of SGLang's ranks: a disk, other servers.

Each rank has a scheduler, and decides for itself what is written and fetched.  So each
has the index of all ranks' files, which they exchange once.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4

import numpy as np
import torch
from sglang import __version__
from sglang.srt.runtime_context import get_parallel

from hybrid_plugin.config import DiskOptions, HybridConfig, PeerOptions, StoreOptions
from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.tiers.outer_tier import Storing
from hybrid_plugin.core.tree.tokens import Tokens
from hybrid_plugin.device.executor import Executor
from hybrid_plugin.device.host.copies import HostCopies
from hybrid_plugin.engine.disk import Disk
from hybrid_plugin.engine.outer_side import OuterSide
from hybrid_plugin.engine.peers import Peers
from hybrid_plugin.engine.rank_files import (
    FilesOfWeights,
    RanksOnDisk,
    describe,
    files_of,
    try_folder,
)
from hybrid_plugin.engine.rank_peers import RankPeers, RanksWithPeers
from hybrid_plugin.engine.rank_peers import describe as describe_peers
from hybrid_plugin.engine.rank_store import RanksInStore, RankStore, join_store
from hybrid_plugin.engine.rank_store import describe as describe_store
from hybrid_plugin.engine.rank_tiers import RankTiers
from hybrid_plugin.engine.session_desk import Serving
from hybrid_plugin.engine.store import Store
from hybrid_plugin.sglang import bundle_layouts, pipeline
from hybrid_plugin.sglang.bundle_identity import KeptLayers, identity_of, kept_layers
from hybrid_plugin.sglang.log import logger
from hybrid_plugin.sglang.outer_steps import OuterSteps, greatest_of_all_ranks
from hybrid_plugin.tiers.bundle import Layouts
from hybrid_plugin.tiers.disk import DiskTier
from hybrid_plugin.tiers.failure import Failure, Reason
from hybrid_plugin.tiers.peers.params import PeerOffer
from hybrid_plugin.tiers.peers.tier import PeerTier
from hybrid_plugin.tiers.rates import DiskRates
from hybrid_plugin.tiers.store.tier import StoreTier

_Given = TypeVar("_Given")


class TextOnly(DiskTier):
    """Takes no sequence with content that has a token's place.

    SGLang puts a number for an image there, beyond all tokens.  It is made from few
    bits of the content: enough while a server runs, not as long as files are kept.
    """

    def __init__(self, *args: Any, vocabulary: int) -> None:
        """As `DiskTier`.

        Args:
            args: for it.
            vocabulary: tokens of the model.
        """
        super().__init__(*args)
        self._vocabulary = vocabulary

    def begin_store(
        self, namespace: Hashable, tokens: Tokens, start: int, size: int
    ) -> Storing | None:
        """See `OuterTier.begin_store`."""
        if has_images(tokens, self._vocabulary):
            return None
        return super().begin_store(namespace, tokens, start, size)


class TextOnlyPeers(PeerTier):
    """Expects nothing for such a sequence: other servers have other numbers there."""

    def __init__(self, *args: Any, vocabulary: int) -> None:
        """As `PeerTier`.

        Args:
            args: for it.
            vocabulary: tokens of the model.
        """
        super().__init__(*args)
        self._vocabulary = vocabulary

    def expect(
        self, namespace: Hashable, tokens: Tokens, offer: PeerOffer
    ) -> Failure | None:
        """See `PeerTier.expect`."""
        if has_images(tokens, self._vocabulary):
            return Failure(Reason.OTHER_TOKENS, "it has images")
        return super().expect(namespace, tokens, offer)


def has_images(tokens: Tokens, vocabulary: int) -> bool:
    """Whether something else than a token of the model is among them."""
    return bool(np.frombuffer(tokens, dtype=np.int64).max() >= vocabulary)


@dataclass(frozen=True, slots=True)
class _Rank:
    """One rank, before anything is behind its host memory."""

    context: Any
    """SGLang's `TreeCacheBuildContext`."""
    host: HostCopies
    kept: KeptLayers
    layouts: Layouts

    def files(self, options: DiskOptions) -> tuple[FilesOfWeights, Disk]:
        model = self.context.model_config
        identity = identity_of(model, self.context.server_args, options, self.kept)
        rank, found = identity.rank_name, try_folder(options, identity)
        ranks = of_all_ranks((rank, self.layouts, found))
        least = DiskRates(
            min(rates.write_bytes_per_second for *_, rates in ranks),
            min(rates.read_bytes_per_second for *_, rates in ranks),
        )
        disk = Disk(
            options,
            RanksOnDisk(
                identity,
                {name: layouts for name, layouts, _ in ranks},
                least.read_bytes_per_second,
            ),
            Serving(str(self.context.server_args.model_path), f"SGLang {__version__}"),
            own={rank: self.layouts},
            gather=of_all_ranks,
            make=partial(TextOnly, vocabulary=model.vocab_size),
        )
        if pipeline.speaks():
            logger.info("%s", describe(options, least, len(ranks)))
            logger.info("hybrid-plugin: %s.", disk.found())
        return files_of(self.host, options, identity, self.layouts), disk

    def store(self, options: StoreOptions) -> tuple[RankStore, Store]:
        model = self.context.model_config
        identity = identity_of(model, self.context.server_args, options, self.kept)
        own = RankStore(self.host, options, identity, self.layouts)
        logger.info("%s", describe_store(options, own.rates, 1))
        vocabulary = model.vocab_size
        store = Store(
            RanksInStore(
                identity,
                {identity.rank_name: self.layouts},
                own.rates.read_bytes_per_second,
            ),
            join_store(options, 0),
            logger,
            make=partial(
                StoreTier, takes=lambda tokens: not has_images(tokens, vocabulary)
            ),
        )
        return own, store

    def peers(self, options: PeerOptions, mark: str) -> tuple[RankPeers, Peers]:
        model = self.context.model_config
        identity = identity_of(model, self.context.server_args, options, self.kept)
        peers = RankPeers(self.host, options, identity, self.layouts)
        ports = tuple(of_all_ranks(peers.port))
        if pipeline.speaks():
            logger.info("%s", describe_peers(options, ports))
        ranks = RanksWithPeers(identity, options.host, ports, mark)
        make = partial(TextOnlyPeers, vocabulary=model.vocab_size)
        return peers, Peers(ranks, logger, make=make)


def attach(context: Any, drafts: Sequence[Any], options: HybridConfig) -> OuterSteps:
    """Put files, other servers or a store behind the host memory of this rank.

    All ranks call it at once, when their host memory is there.

    Args:
        context: SGLang's `TreeCacheBuildContext`, with our allocator in it.
        drafts: KV pools of draft models.
        options: that give a disk, peers or a store.

    Raises:
        ConfigError: if the folder, NIXL or the address cannot be used, or the model not
            be told from others.
    """
    allocator = context.params.token_to_kv_pool_allocator
    cache: HybridCache = allocator.cache
    executor: Executor = allocator.executor
    assert cache.host is not None and executor.host is not None, "it is needed"
    slots = context.params.req_to_token_pool
    kept = kept_layers(
        context.model_config,
        allocator.get_kvcache(),
        slots.mamba_pool if cache.slots.needed else None,
        cache.page_size,
        cache.windows[0].window if cache.windows else None,
        drafts,
    )
    layouts = bundle_layouts.layouts(
        executor.parts(), cache.host.plan.row_bytes, cache.page_size, kept.named
    )
    (mark, *_) = of_all_ranks(uuid4().hex)
    rank = _Rank(context, executor.host, kept, layouts)
    files, disk = (None, None) if options.disk is None else rank.files(options.disk)
    own, peers = (
        (None, None) if options.peers is None else rank.peers(options.peers, mark)
    )
    rank_store, store = (
        (None, None) if options.store is None else rank.store(options.store)
    )
    tiers = RankTiers(
        executor, greatest_of_all_ranks, files=files, peers=own, store=rank_store
    )
    outer = OuterSide(cache, disk=disk, peers=peers, store=store)
    return OuterSteps(cache, tiers, outer, mark)


def of_all_ranks(own: _Given) -> list[_Given]:
    """What each rank gives, in their order; all call it at once."""
    parallel = get_parallel()
    if parallel.tp_size == 1:
        return [own]
    found: list[Any] = [None] * parallel.tp_size
    torch.distributed.all_gather_object(found, own, parallel.tp_group.cpu_group)
    return found
