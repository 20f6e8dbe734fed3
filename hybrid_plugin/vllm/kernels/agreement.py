# SPDX-License-Identifier: Apache-2.0
"""Whether passes keep states in the middle of a prompt, known to the engine core.

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


class InteriorSpecs(dict[str, "KVCacheSpec"]):
    """Specs by layer of a worker whose passes keep states.

    vLLM pickles what a worker returns as it is, so the class reaches the engine core.
    """


def keep_interior(specs: Sequence[Mapping[str, KVCacheSpec]]) -> bool:
    """Whether passes keep states on all ranks.

    Args:
        specs: of every worker.

    Raises:
        ConfigError: if only some of them do.
    """
    answers = {isinstance(s, InteriorSpecs) for s in specs}
    if len(answers) > 1:
        raise ConfigError(_DIFFER)
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
