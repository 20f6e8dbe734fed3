# SPDX-License-Identifier: Apache-2.0
"""What passes do with states, known to the engine core: whether they keep some in the
middle of a prompt, and whether drafts leave records and no states.

Only the workers have the layers, so they say it along with what their layers cache; the
engine core plans with it and sends it back in the cache's configuration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hybrid_plugin.config import ConfigError

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheSpec

_DIFFER = (
    "hybrid-plugin's kernels run every state layer's prefill on some ranks only. Set "
    'the option "kernels" to "engine".'
)


_RECORD_DIFFERENTLY = (
    "hybrid-plugin records drafts on some ranks only. Set the option "
    '"draft_states" to "columns".'
)


class InteriorSpecs(dict[str, "KVCacheSpec"]):
    """Specs by layer of a worker whose passes keep states.

    vLLM pickles what a worker returns as it is, so the class reaches the engine core.
    """


class RecordingSpecs(InteriorSpecs):
    """Specs of one whose passes record drafts besides: our kernels run everything."""


def specs_of(
    specs: dict[str, KVCacheSpec], *, interior: bool, records: bool
) -> dict[str, KVCacheSpec]:
    """What a worker says its layers cache.

    Args:
        specs: by layer.
        interior: whether its passes keep states.
        records: whether they record drafts.
    """
    if records:
        return RecordingSpecs(specs)
    return InteriorSpecs(specs) if interior else specs


def keep_interior(specs: Sequence[Mapping[str, KVCacheSpec]]) -> bool:
    """Whether passes keep states on all ranks.

    Args:
        specs: of every worker.

    Raises:
        ConfigError: if only some of them do.
    """
    return _of_all(specs, InteriorSpecs, _DIFFER)


def record_drafts(specs: Sequence[Mapping[str, KVCacheSpec]]) -> bool:
    """Whether passes record drafts on all ranks; likewise."""
    return _of_all(specs, RecordingSpecs, _RECORD_DIFFERENTLY)


def _of_all(
    specs: Sequence[Mapping[str, KVCacheSpec]], kind: type, sentence: str
) -> bool:
    answers = {isinstance(one, kind) for one in specs}
    if len(answers) > 1:
        raise ConfigError(sentence)
    return answers == {True}


def check(planned: bool, here: bool) -> None:
    """Compare what the engine core planned with what a worker's layers do.

    Raises:
        ConfigError: if they differ.
    """
    if planned != here:
        raise ConfigError(
            f"{_DIFFER} The engine core {'counts' if planned else 'does not count'} on "
            f"it, this rank's layers do {'keep' if here else 'not keep'} states."
        )
