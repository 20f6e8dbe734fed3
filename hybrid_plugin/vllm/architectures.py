# SPDX-License-Identifier: Apache-2.0
"""Every architecture with state layers that a vLLM knows, as its source tells.

Nothing is built or imported: classes are found by what they derive from.
"""

from __future__ import annotations

from collections.abc import Iterable

from hybrid_plugin.engine.architectures import Provider, Standing
from hybrid_plugin.engine.outlook import Prospect
from hybrid_plugin.vllm import model_sources
from hybrid_plugin.vllm.model_sources import ModelSources

FOR_GPUS = "on GPUs alone"
_HYBRID, _STATES_ALONE = "IsHybrid", {"IsAttentionFree", "HasInnerState"}


def standings(
    ours: Iterable[str], sources: ModelSources | None = None
) -> list[Standing]:
    """Of all, by name.

    Args:
        ours: architectures that the plugin has classes of.
        sources: of the vLLM; by default the one that is installed.
    """
    sources = sources or model_sources.installed()
    found = {name: Standing(name, Provider.OURS, Prospect.SERVED) for name in ours}
    for name, (module, cls) in sources.generating.items():
        standing = _of_vllms(name, module, cls, sources)
        if standing is not None and name not in found:
            found[name] = standing
    return sorted(found.values(), key=lambda standing: standing.architecture)


def _of_vllms(
    name: str, module: str, cls: str, sources: ModelSources
) -> Standing | None:
    """None for an architecture without state layers."""
    kinds = set(sources.ancestors(cls))
    if _HYBRID not in kinds and not kinds >= _STATES_ALONE:
        return None
    unknown = sources.kinds_without_pools(module)
    if unknown:
        reason = f"it keeps caches of the kind {unknown[0]}, which is not supported yet"
        return Standing(name, Provider.ENGINE, Prospect.REFUSED, reason)
    note = FOR_GPUS if sources.is_for_gpus(module) else ""
    return Standing(name, Provider.ENGINE, Prospect.SERVED, note=note)
