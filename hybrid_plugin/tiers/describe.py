# SPDX-License-Identifier: Apache-2.0
"""The manifest and the tensors of a bundle that is to be written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from hybrid_plugin.core.commands import PoolId
from hybrid_plugin.tiers import header
from hybrid_plugin.tiers.bundle import Bundle, Layouts
from hybrid_plugin.tiers.bundle_file import Rows, checksum
from hybrid_plugin.tiers.keys import BundleName
from hybrid_plugin.tiers.manifest import STATE, TOKENS, Manifest, Run

_NO_CHECKSUM = "0" * 32
_TOKEN_BYTES = 8


def describe(
    name: BundleName,
    start: int,
    end: int,
    pages: Mapping[PoolId, int],
    rank: str,
    layouts: Layouts,
) -> Manifest:
    """The manifest of a bundle, without its checksums.

    Args:
        name: of the bundle.
        start: its first token.
        end: behind its last token.
        pages: the first token that counts of every pool of pages.
        rank: `Identity.rank_name` of whose part it is.
        layouts: of this rank.

    Raises:
        ValueError: if the bundle has other pools than the layouts.
    """
    if pages.keys() != layouts.pages.keys():
        raise ValueError(f"a bundle with pages of {sorted(pages)}")
    runs = tuple(
        Run(pool, pages[pool], layout) for pool, layout in layouts.pages.items()
    )
    return Manifest(
        key=name.key,
        parent=name.parent,
        anchor=name.anchor,
        fingerprint=name.fingerprint,
        rank=rank,
        start=start,
        end=end,
        runs=runs,
        state=layouts.state,
        checksums=(_NO_CHECKSUM,) * (len(runs) + (layouts.state is not None) + 1),
    )


def frame_bytes(
    name: BundleName, start: int, end: int, rank: str, layouts: Layouts
) -> int:
    """Bytes of a bundle's file beside those of its rows, or a little more.

    Args:
        name: of the bundle.
        start: its first token.
        end: behind its last token.
        rank: `Identity.rank_name` of whose part it is.
        layouts: of this rank.
    """
    # Nothing begins further back than the end, whose number is the longest.
    pages = dict.fromkeys(layouts.pages, end)
    manifest = describe(name, start, end, pages, rank, layouts)
    return len(header.encode(manifest)) + _TOKEN_BYTES * (end - start)


def file_bytes(manifest: Manifest) -> int:
    """Bytes of a bundle's file, which do not depend on checksums."""
    return len(header.encode(manifest)) + manifest.data_bytes


def with_checksums(manifest: Manifest, tensors: Mapping[str, Rows]) -> Manifest:
    """The manifest of these contents."""
    sums = tuple(checksum(tensors[tensor.name]) for tensor in manifest.tensors())
    return replace(manifest, checksums=sums)


def tensors_of(bundle: Bundle) -> dict[str, Rows]:
    """All memory of a bundle by the names of its tensors."""
    tokens = np.array(bundle.tokens[bundle.start :], dtype="<i8").view(np.uint8)
    tensors: dict[str, Rows] = {pool: run.rows for pool, run in bundle.pages.items()}
    if bundle.state is not None:
        tensors[STATE] = [bundle.state]
    return {**tensors, TOKENS: [tokens]}
