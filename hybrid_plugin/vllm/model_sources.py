# SPDX-License-Identifier: Apache-2.0
"""The models of a vLLM as its Python files tell, installed or an unpacked wheel.

Nothing of it is imported: a release for GPUs can be read where it cannot run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

from hybrid_plugin.vllm import servable

_REGISTRY = "model_executor/models/registry.py"
_ALL, _GENERATING = "_VLLM_MODELS", ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS")
_BY_NAME = "vllm.model_executor.models"
_BY_DEVICE = "vllm.models"
"""Packages with a folder for each kind of device that a model is written for."""
_CACHES, _CACHE = "v1/kv_cache_interface.py", "KVCacheSpec"

Models = Mapping[str, tuple[str, str]]
"""Module and class, by architecture."""


@dataclass(frozen=True)
class ModelSources:
    """Of one vLLM."""

    root: Path
    """Of the package `vllm`."""

    @cached_property
    def generating(self) -> Models:
        """Architectures that generate text, of text alone and of more."""
        tables = self._tables
        return {n: entry for table in _GENERATING for n, entry in tables[table].items()}

    @cached_property
    def names(self) -> frozenset[str]:
        """All architectures, whatever they do."""
        return frozenset(name for table in self._tables.values() for name in table)

    def ancestors(self, name: str) -> Iterator[str]:
        """Names of a class and of all that it derives from."""
        yield from _ancestors(name, self._bases)

    def kinds_without_pools(self, module: str) -> list[str]:
        """As `servable.unknown_kinds`."""
        called = set(servable.called_in(self._files(module)))
        return servable.without_pools(called & self.kinds_of_caches, module)

    @cached_property
    def kinds_of_caches(self) -> frozenset[str]:
        """Names of the specs that layers may declare."""
        bases = _bases([self.root / _CACHES])
        return frozenset(name for name in bases if _CACHE in _ancestors(name, bases))

    def is_for_gpus(self, module: str) -> bool:
        """Whether a module has its models by device, and none for a CPU."""
        if not module.startswith(f"{_BY_DEVICE}."):
            return False
        return not (self._place(module) / "cpu").is_dir()

    @cached_property
    def _tables(self) -> dict[str, Models]:
        """The tables that vLLM's list of all models is made of, by their names."""
        tree = ast.parse((self.root / _REGISTRY).read_bytes())
        dicts = dict(filter(None, map(_dict_of, tree.body)))
        parts = [v.id for v in dicts[_ALL].values if isinstance(v, ast.Name)]
        return {part: _models(dicts[part]) for part in parts}

    @cached_property
    def _bases(self) -> Mapping[str, list[str]]:
        places = map(self._place, (_BY_NAME, _BY_DEVICE))
        return _bases(file for place in places for file in sorted(place.rglob("*.py")))

    def _files(self, module: str) -> list[Path]:
        """Of a module, or of its package."""
        place = self._place(module)
        single = place.with_suffix(".py")
        return [single] if single.is_file() else sorted(place.rglob("*.py"))

    def _place(self, module: str) -> Path:
        return self.root.joinpath(*module.split(".")[1:])


def installed() -> ModelSources:
    """Of the vLLM that is here.

    Raises:
        ModuleNotFoundError: if there is none.
    """
    found = find_spec("vllm")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("vllm is not installed")
    return ModelSources(Path(found.origin).parent)


def _dict_of(statement: ast.stmt) -> tuple[str, ast.Dict] | None:
    """Name and value of an assignment, if it is one of a dictionary."""
    if isinstance(statement, ast.Assign):
        target: ast.expr = statement.targets[0]
    elif isinstance(statement, ast.AnnAssign):
        target = statement.target
    else:
        return None
    if isinstance(target, ast.Name) and isinstance(statement.value, ast.Dict):
        return target.id, statement.value
    return None


def _models(table: ast.Dict) -> Models:
    """Entries that are written out, with whole names of modules.

    What else a table takes in is picked out of others.
    """
    pairs = zip(table.keys, table.values, strict=True)
    written = {
        ast.literal_eval(key): ast.literal_eval(value)
        for key, value in pairs
        if key is not None
    }
    return {
        name: (module if module.startswith("vllm.") else f"{_BY_NAME}.{module}", cls)
        for name, (module, cls) in written.items()
    }


def _bases(files: Iterator[Path] | list[Path]) -> dict[str, list[str]]:
    """What each class in some files derives from, by name; of classes of one name, what
    any of them does."""
    found: dict[str, list[str]] = {}
    for file in files:
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.ClassDef):
                bases = [base for base in map(_name_of, node.bases) if base]
                found.setdefault(node.name, []).extend(bases)
    return found


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
        fresh = {base for base in bases.get(current, ()) if base not in seen}
        seen |= fresh
        waiting += sorted(fresh)
