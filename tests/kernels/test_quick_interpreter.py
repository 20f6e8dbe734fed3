# SPDX-License-Identifier: Apache-2.0
"""The interpreter that is spared what it repeats does what it did."""

from __future__ import annotations

import importlib
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from .conftest import _NO_TRITON
from .quick_interpreter import replaced_once, types_once

pytestmark = pytest.mark.skipif(
    _NO_TRITON is not None or torch.cuda.is_available(),
    reason="kernels are not interpreted here",
)


@pytest.fixture
def interpreter() -> ModuleType:
    found = importlib.import_module("triton.runtime.interpreter")
    if not hasattr(found, "_LangPatchScope"):
        pytest.skip("launches of this Triton undo nothing")
    return found


def test_names_are_replaced_once_in_a_launch_and_then_are_as_before(
    interpreter: ModuleType,
) -> None:
    language, calls = interpreter.tl, []

    def replace(function: Any) -> Any:
        calls.append(function)
        scope = interpreter._LangPatchScope()
        scope.set_attr(language, "range", "replaced")
        return scope

    patch_lang = replaced_once(
        SimpleNamespace(  # type: ignore[arg-type]
            _patch_lang=replace,
            _LangPatchScope=interpreter._LangPatchScope,
            tl=language,
        )
    )
    kernel = SimpleNamespace(__globals__={"tl": language})
    of_core = SimpleNamespace(__globals__={"tl": language, "core": language.core})
    before = language.range
    for launch in (1, 2):
        scope = patch_lang(kernel)
        patch_lang(kernel)
        patch_lang(kernel).restore()
        assert language.range == "replaced"
        assert calls == [kernel] * launch
        scope.restore()
        assert language.range is before
    scope = patch_lang(kernel)
    inner = patch_lang(of_core)
    assert calls[-1] is of_core, "it has names of more than the launch has replaced"
    inner.restore()
    scope.restore()
    assert language.range is before


def test_types_are_those_of_the_interpreter(interpreter: ModuleType) -> None:
    core, asked = interpreter.tl.core, []
    look_up = interpreter._get_np_dtype

    def noted(of: Any) -> Any:
        asked.append(of)
        return look_up(of)

    np_type = types_once(
        SimpleNamespace(_get_np_dtype=noted, tl=interpreter.tl)  # type: ignore[arg-type]
    )
    names = ("int1", "int8", "uint8", "int32", "int64", "fp16", "bf16", "fp32", "fp64")
    scalars = [core.dtype(name) for name in names]
    pointer = core.pointer_type(core.float32)
    blocks = [core.block_type(scalar, [16]) for scalar in (*scalars, pointer)]
    for _ in range(2):
        for of in (*scalars, pointer, *blocks):
            assert np_type(of) == look_up(of)
    assert len([of for of in asked if of in scalars]) == len(scalars)
    assert len(asked) == len(scalars) + 2 * 2, "pointers are asked for each time"
