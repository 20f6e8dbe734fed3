# SPDX-License-Identifier: Apache-2.0
"""Something that we rely on, renamed in the engine of this process."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest

from hybrid_plugin.upstream.hookpoints import (
    Contract,
    HookPoint,
    Interface,
    LiveView,
    resolve,
)
from tests.compat.rename import renamed_use


def take_away(
    contract: Contract, engine: str, patch: pytest.MonkeyPatch, folder: Path
) -> None:
    """Rename what the contract is about, until `patch` is undone."""
    if isinstance(contract, Interface):
        _rename_use(contract, engine, patch, folder)
        return
    assert isinstance(contract, HookPoint)
    owner, name = resolve(contract.target)
    if not isinstance(owner, type):
        patch.delattr(owner, name)
        return
    for cls in owner.__mro__[:-1]:
        if name in vars(cls):
            patch.delattr(cls, name)
        if name in inspect.get_annotations(cls):
            patch.delitem(cls.__annotations__, name)


def _rename_use(
    contract: Interface, engine: str, patch: pytest.MonkeyPatch, folder: Path
) -> None:
    module = importlib.import_module(contract.user)
    assert module.__file__ is not None
    uses = contract.uses(LiveView(engine))
    name = next(n for n in uses if n not in contract.unreached)
    renamed = folder / "renamed.py"
    renamed.write_text(renamed_use(Path(module.__file__).read_text(), contract, name))
    patch.setattr(module, "__file__", str(renamed))
