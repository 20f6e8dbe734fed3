# SPDX-License-Identifier: Apache-2.0
"""The pytest plugin: an engine's tests, with ours in place of what they test.

Every test that is collected must be in the expectations, and the other way round:
what upstream adds, renames or drops is looked at by someone.
"""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import expectations
import pytest
from expectations import Expectations, Expected, function_of

FILE_VARIABLE = "HYBRID_UPSTREAM_EXPECTATIONS"
STOCK_VARIABLE = "HYBRID_UPSTREAM_STOCK"


def pytest_configure(config: pytest.Config) -> None:
    """Load the plugin, before any test's module imports the engine."""
    if not _stock():
        _resolve(_expected().load)()


def pytest_collection_modifyitems(
    config: pytest.Config, items: Sequence[pytest.Item]
) -> None:
    """Mark each test as it is expected to go, and put ours in."""
    expected = _expected()
    _require_known(expected, items)
    if not (config.getoption("keyword") or _names_a_test(config)):
        _require_all(expected, items)
    for item in items:
        _mark(item, expected)
    if not _stock():
        for theirs, ours in expected.replace.items():
            module, _, name = theirs.partition(":")
            setattr(importlib.import_module(module), name, _resolve(ours))
    gc.freeze()  # vLLM's tests collect garbage after each: not what is loaded by now


def _mark(item: pytest.Item, expected: Expectations) -> None:
    file, test = _split(item)
    found = expected.of(file, test)
    assert found is not None
    if found.outcome is Expected.NOT_APPLICABLE:
        item.add_marker(pytest.mark.skip(reason=found.because))
    elif found.outcome is Expected.FAIL and not _stock():
        item.add_marker(pytest.mark.xfail(reason=found.because, strict=True))


def _require_known(expected: Expectations, items: Sequence[pytest.Item]) -> None:
    unknown = [item.nodeid for item in items if expected.of(*_split(item)) is None]
    if unknown:
        raise pytest.UsageError(
            f"Nothing is expected of {', '.join(unknown)}: see how it goes, and say so "
            f"in {_file().name}."
        )


def _require_all(expected: Expectations, items: Sequence[pytest.Item]) -> None:
    there = set(_names(items))
    gone = [
        f"{file}::{test}"
        for file, listed in expected.tests.items()
        for test in listed
        if (file, test) not in there
    ]
    if gone:
        raise pytest.UsageError(
            f"There is no test {', '.join(gone)}: take it out of {_file().name}."
        )


def _names(items: Sequence[pytest.Item]) -> Iterator[tuple[str, str]]:
    for item in items:
        file, test = _split(item)
        yield file, test
        yield file, function_of(test)


def _split(item: pytest.Item) -> tuple[str, str]:
    file, _, test = item.nodeid.partition("::")
    return file, test


def _names_a_test(config: pytest.Config) -> bool:
    return any("::" in argument for argument in config.args)


def _expected() -> Expectations:
    return expectations.load(_file())


def _file() -> Path:
    return Path(os.environ[FILE_VARIABLE])


def _stock() -> bool:
    return os.environ.get(STOCK_VARIABLE) == "1"


def _resolve(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)
