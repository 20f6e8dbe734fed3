# SPDX-License-Identifier: Apache-2.0
"""What the adapters rely on, by engine."""

from __future__ import annotations

import importlib
from pathlib import Path

from hybrid_plugin.upstream.hookpoints import Contract, Finding, SourceView, check
from hybrid_plugin.upstream.matrix import Row, Status

_DECLARED_IN = {
    "vllm": ("hybrid_plugin.vllm.contracts", "hybrid_models.vllm.contracts"),
    "sglang": (
        "hybrid_plugin.sglang.contracts",
        "hybrid_models.sglang.contracts",
        "hybrid_plugin.sglang_cpu.replacements",
    ),
}
"""Modules with `HOOKS`; importing them imports no engine."""

ENGINES = tuple(_DECLARED_IN)
TITLES = {"vllm": "vLLM", "sglang": "SGLang"}


def contracts_of(engine: str) -> tuple[Contract, ...]:
    """All that the adapter of an engine relies on."""
    found: dict[str, Contract] = {}
    for module in _DECLARED_IN[engine]:
        for contract in importlib.import_module(module).HOOKS:
            key = repr(contract)
            found.setdefault(key, contract)
    return tuple(found.values())


def check_source(engine: str, version: str, root: Path) -> list[Finding]:
    """Check all contracts in a folder that holds the engine's package."""
    return check(contracts_of(engine), SourceView(root, engine, version))


def verdict(row: Row, findings: list[Finding]) -> str | None:
    """What is wrong with a row, given what its source shows; None if nothing is."""
    broken = [f.problem for f in findings if f.problem is not None]
    if row.status is Status.REFUSED:
        if broken:
            return None
        return (
            f"{row.name} is refused in the matrix, yet all its contracts hold: try "
            "its engine tests and change its status."
        )
    if broken:
        return f"{row.name} breaks {len(broken)} contracts: " + "; ".join(broken)
    return None
