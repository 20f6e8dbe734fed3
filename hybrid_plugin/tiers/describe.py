# SPDX-License-Identifier: Apache-2.0
"""The manifest and the tensors of a bundle that is to be stored."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hybrid_plugin.tiers.bundle import Bundle, Layouts
from hybrid_plugin.tiers.bundle_file import Rows, checksum
from hybrid_plugin.tiers.identity import Identity
from hybrid_plugin.tiers.keys import anchor_of, keys_at
from hybrid_plugin.tiers.manifest import STATE, TOKENS, Manifest, Run

_NO_CHECKSUM = "0" * 32


def describe(bundle: Bundle, identity: Identity, layouts: Layouts) -> Manifest:
    """The manifest of a bundle, without its checksums.

    Raises:
        ValueError: if the bundle has other pools than the layouts.
    """
    if bundle.pages.keys() != layouts.pages.keys() or (
        (bundle.state is None) != (layouts.state is None)
    ):
        raise ValueError(f"a bundle with pages of {sorted(bundle.pages)}")
    end = len(bundle.tokens)
    fingerprint = identity.fingerprint()
    anchor = anchor_of(end)
    keys = keys_at(
        fingerprint, bundle.namespace, bundle.tokens, {bundle.start, anchor, end}
    )
    runs = tuple(
        Run(pool, bundle.pages[pool].start, layout)
        for pool, layout in layouts.pages.items()
    )
    return Manifest(
        key=keys[end],
        parent=keys[bundle.start] if bundle.start else "",
        anchor=keys[anchor],
        fingerprint=fingerprint,
        rank=identity.rank_name,
        start=bundle.start,
        end=end,
        runs=runs,
        state=layouts.state,
        checksums=(_NO_CHECKSUM,) * (len(runs) + (layouts.state is not None) + 1),
    )


def with_checksums(manifest: Manifest, tensors: dict[str, Rows]) -> Manifest:
    """The manifest of these contents."""
    sums = tuple(checksum(tensors[tensor.name]) for tensor in manifest.tensors())
    return replace(manifest, checksums=sums)


def tensors_of(bundle: Bundle) -> dict[str, Rows]:
    """All memory of a bundle by the names of its tensors."""
    tokens = np.array(bundle.tokens[bundle.start :], dtype="<i8").view(np.uint8)
    tensors = {pool: pages.rows for pool, pages in bundle.pages.items()}
    if bundle.state is not None:
        tensors[STATE] = [bundle.state]
    return {**tensors, TOKENS: [tokens]}
