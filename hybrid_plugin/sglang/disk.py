# SPDX-License-Identifier: Apache-2.0
"""The disk behind the host memory of SGLang's ranks.

Each rank has a scheduler, and decides for itself what is written and fetched.  So each
has the index of all ranks' files, which they exchange once.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4

import numpy as np
import torch
from sglang.srt.runtime_context import get_parallel

from hybrid_plugin.config import DiskOptions
from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.tiers.outer_tier import Storing
from hybrid_plugin.core.tree.tokens import Tokens
from hybrid_plugin.device.executor import Executor
from hybrid_plugin.engine.disk import Disk
from hybrid_plugin.engine.outer_side import OuterSide
from hybrid_plugin.engine.rank_files import (
    RanksOnDisk,
    describe,
    files_of,
    try_folder,
)
from hybrid_plugin.engine.rank_tiers import RankTiers
from hybrid_plugin.sglang import bundle_layouts
from hybrid_plugin.sglang.bundle_identity import identity_of, kept_layers
from hybrid_plugin.sglang.log import logger
from hybrid_plugin.sglang.outer_steps import OuterSteps, greatest_of_all_ranks
from hybrid_plugin.tiers.disk import DiskTier
from hybrid_plugin.tiers.rates import DiskRates

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
        if np.frombuffer(tokens, dtype=np.int64).max() >= self._vocabulary:
            return None
        return super().begin_store(namespace, tokens, start, size)


def attach(context: Any, drafts: Sequence[Any], options: DiskOptions) -> OuterSteps:
    """Open this rank's folder, and have its cache use what all ranks have.

    All ranks call it at once, when their host memory is there.

    Args:
        context: SGLang's `TreeCacheBuildContext`, with our allocator in it.
        drafts: KV pools of draft models.
        options: of the disk.

    Raises:
        ConfigError: if the folder cannot be used, or the model not be told from others.
    """
    allocator, model = context.params.token_to_kv_pool_allocator, context.model_config
    cache: HybridCache = allocator.cache
    executor: Executor = allocator.executor
    assert cache.host is not None, "disk needs it"
    slots = context.params.req_to_token_pool
    kept = kept_layers(
        model,
        allocator.get_kvcache(),
        slots.mamba_pool if cache.slots.needed else None,
        cache.page_size,
        cache.windows[0].window if cache.windows else None,
        drafts,
    )
    own = bundle_layouts.layouts(
        executor.parts(), cache.host.plan.row_bytes, cache.page_size, kept.named
    )
    identity = identity_of(model, context.server_args, options, kept)
    rank, found = identity.rank_name, try_folder(options, identity)
    ranks = of_all_ranks((rank, own, found, uuid4().hex))
    least = DiskRates(
        min(rates.write_bytes_per_second for _, _, rates, _ in ranks),
        min(rates.read_bytes_per_second for _, _, rates, _ in ranks),
    )
    assert executor.host is not None, "files are behind it"
    files = files_of(executor.host, options, identity, own)
    disk = Disk(
        options,
        RanksOnDisk(
            identity,
            {name: layouts for name, layouts, _, _ in ranks},
            least.read_bytes_per_second,
        ),
        own={rank: own},
        gather=of_all_ranks,
        make=partial(TextOnly, vocabulary=model.vocab_size),
    )
    if get_parallel().tp_rank == 0:
        logger.info("%s", describe(options, least, len(ranks)))
        logger.info("hybrid-plugin: %s.", disk.found())
    tiers = RankTiers(executor, greatest_of_all_ranks, files=files)
    return OuterSteps(cache, tiers, OuterSide(cache, disk=disk), mark=ranks[0][-1])


def of_all_ranks(own: _Given) -> list[_Given]:
    """What each rank gives, in their order; all call it at once."""
    parallel = get_parallel()
    if parallel.tp_size == 1:
        return [own]
    found: list[Any] = [None] * parallel.tp_size
    torch.distributed.all_gather_object(found, own, parallel.tp_group.cpu_group)
    return found
