# SPDX-License-Identifier: Apache-2.0
"""What is expected of an engine's own tests: a YAML file for one version of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml


class ExpectationsError(ValueError):
    """A file of expectations that says too little or too much."""


class Expected(StrEnum):
    """How a test goes with the plugin active."""

    PASS = "pass"
    FAIL = "fail"
    """It asserts something that the plugin does otherwise, and rightly so."""
    NOT_APPLICABLE = "not applicable"
    """It tests what the plugin refuses or replaces, or fails without it too."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """Of one test, and why it is not to pass."""

    outcome: Expected
    because: str = ""


@dataclass(frozen=True, slots=True)
class Expectations:
    """Of one engine version's tests."""

    engine: str
    """The package that must be installed, in this version."""
    version: str
    commit: str
    """What to check out."""
    load: str
    """`module:function` that loads the plugin, as the engine would."""
    replace: Mapping[str, str]
    """`module:name` in the tests, and our `module:name` in its place."""
    models: Mapping[str, Mapping[str, Any]]
    """Configurations that tests ask the hub for; no network is used."""
    blobs: Mapping[str, str]
    """The git object name of each file with tests, as of the commit."""
    tests: Mapping[str, Mapping[str, Expectation]]
    """By file, then by test: `function`, `Class::method`, or one case of it."""

    def of(self, file: str, test: str) -> Expectation | None:
        """Of a test; None if nothing is said.

        Args:
            file: relative to the checkout.
            test: `Class::method[case]` or a part of it from the left.  What is said
                of the case goes before what is said of the function.
        """
        said = self.tests.get(file, {})
        return said.get(test) or said.get(function_of(test))


def function_of(test: str) -> str:
    """A test's name without the brackets of a case."""
    return test.partition("[")[0]


def load(file: Path) -> Expectations:
    """Read a file of expectations.

    Raises:
        ExpectationsError: naming what is wrong.
    """
    content = yaml.safe_load(file.read_text())
    try:
        tests = {
            path: {name: _expectation(name, said) for name, said in listed.items()}
            for path, listed in content.pop("tests").items()
        }
        expected = Expectations(tests=tests, **content)
        if expected.blobs.keys() != tests.keys():
            raise ValueError("blobs and tests name different files")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ExpectationsError(f"{file.name} is wrong: {error}.") from error
    return expected


def _expectation(name: str, said: Any) -> Expectation:
    """`pass`, or another outcome with its reason."""
    if said == Expected.PASS:
        return Expectation(Expected.PASS)
    if isinstance(said, dict) and len(said) == 1:
        ((outcome, because),) = said.items()
        if Expected(outcome) is not Expected.PASS and because:
            return Expectation(Expected(outcome), str(because))
    raise ValueError(f"{name} must say pass, or another outcome with its reason")
