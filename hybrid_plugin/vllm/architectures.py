# SPDX-License-Identifier: Apache-2.0
"""Every architecture with state layers that vLLM knows, as its source tells.

Nothing is built or imported: classes are found by what they derive from.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

from hybrid_plugin.engine.architectures import Provider, Standing
from hybrid_plugin.engine.outlook import Prospect
from hybrid_plugin.vllm import servable

_MODELS = "vllm.model_executor.models"
_HYBRID, _STATES_ALONE = "IsHybrid", {"IsAttentionFree", "HasInnerState"}


def standings(ours: Iterable[str]) -> list[Standing]:
    """Of all, by name.

    Args:
        ours: architectures that the plugin has classes of.
    """
    from vllm.model_executor.models import registry

    bases = _bases_of_models()
    found = {name: Standing(name, Provider.OURS, Prospect.SERVED) for name in ours}
    generating = registry._TEXT_GENERATION_MODELS | registry._MULTIMODAL_MODELS
    for name, (module, cls) in generating.items():
        kinds = set(_ancestors(cls, bases))
        standing = _of_vllms(name, f"{_MODELS}.{module}", kinds)
        if standing is not None:
            found[name] = standing
    return sorted(found.values(), key=lambda standing: standing.architecture)


def _of_vllms(name: str, module: str, kinds: set[str]) -> Standing | None:
    """None for an architecture without state layers."""
    if _HYBRID not in kinds and not kinds >= _STATES_ALONE:
        return None
    unknown = servable.unknown_kinds(module)
    if unknown:
        reason = f"it keeps caches of the kind {unknown[0]}, which is not supported yet"
        return Standing(name, Provider.ENGINE, Prospect.REFUSED, reason)
    return Standing(name, Provider.ENGINE, Prospect.SERVED)


def _bases_of_models() -> dict[str, list[str]]:
    """What each class of vLLM's models derives from, by name."""
    package = find_spec(_MODELS)
    folders = None if package is None else package.submodule_search_locations
    return {
        node.name: [base for base in map(_name_of, node.bases) if base]
        for folder in folders or ()
        for file in Path(folder).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_bytes()))
        if isinstance(node, ast.ClassDef)
    }


def _name_of(base: ast.expr) -> str:
    if isinstance(base, ast.Attribute):
        return base.attr
    return base.id if isinstance(base, ast.Name) else ""


def _ancestors(name: str, bases: Mapping[str, list[str]]) -> Iterator[str]:
    """A class, and all that it derives from."""
    seen, waiting = {name}, [name]
    while waiting:
        current = waiting.pop()
        yield current
        fresh = [base for base in bases.get(current, ()) if base not in seen]
        seen.update(fresh)
        waiting += fresh
