# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of every architecture, each written once for all tests of a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.kinds import KINDS, Kind


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Those written so far, by kind."""
    return {"": tmp_path_factory.mktemp("models")}


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param


@pytest.fixture
def checkpoint(kind: Kind, checkpoints: dict[str, Path]) -> Path:
    if kind.name not in checkpoints:
        checkpoints[kind.name] = kind.write(checkpoints[""] / kind.name)
    return checkpoints[kind.name]
