# SPDX-License-Identifier: Apache-2.0
"""`hybrid-plugin bundle`."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from hybrid_plugin.cli import main
from hybrid_plugin.tiers.manifest import Manifest
from hybrid_plugin.tiers.shelf import SUFFIX
from tests.tiers.one_rank import OneRank
from tests.tiers.support import IDENTITY, Unsynced, as_tokens, layouts, store_path

OWN = layouts()
TOKENS = as_tokens(*range(40))
OTHER = replace(IDENTITY, update="1")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Two bundles of one model and one of another."""
    used_at = iter((1000, 2000, 3000))  # of a clock with steps of its own
    for identity, ends in ((IDENTITY, (6, 9)), (OTHER, (12,))):
        folder = OneRank(tmp_path, 1 << 20, identity, OWN, files=Unsynced())
        for stored in store_path(folder, OWN, None, TOKENS, *ends):
            assert isinstance(stored, Manifest)
            at = next(used_at)
            os.utime(folder.path / (stored.key + SUFFIX), (at, at))
        folder.close()
    return tmp_path


def bundles(place: Path) -> list[Path]:
    return sorted(place.glob("*/*" + SUFFIX))


def damage(place: Path) -> Path:
    """Flip a bit behind the header of one bundle."""
    path = bundles(place)[0]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    return path


def test_lists_all(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bundle", "ls", str(place)]) == 0
    *lines, total = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert total.startswith("3 bundles of 2 models, 0.01 MiB")
    assert "tokens 0 to 12" in lines[0] and OTHER.fingerprint()[:12] in lines[0]
    assert main(["bundle", "ls", "--json", str(place / IDENTITY.rank_name)]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [(e["start"], e["end"]) for e in listed] == [(0, 12), (6, 9), (0, 6)]
    assert listed[1]["parent"] == listed[2]["key"] and listed[2]["parent"] is None
    assert {entry["problem"] for entry in listed} == {None}


def test_lists_what_it_cannot_read(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundles(place)[0].write_bytes(b"half")
    assert main(["bundle", "ls", str(place)]) == 0
    assert "shorter or longer" in capsys.readouterr().out


def test_verifies(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bundle", "verify", str(place)]) == 0
    assert capsys.readouterr().out == "3 of 3 bundles are in order.\n"
    bad = damage(place)
    assert main(["bundle", "verify", str(place)]) == 1
    out = capsys.readouterr().out
    assert f"{bad}: a checksum does not match: tokens\n2 of 3" in out
    bundles(place)[1].rename(bundles(place)[0])  # of another name
    assert main(["bundle", "verify", str(place)]) == 1
    assert "another bundle is in its place" in capsys.readouterr().out


def test_removes_by_key(place: Path) -> None:
    keep, gone, other = bundles(place)
    key = gone.name.removesuffix(SUFFIX)
    assert main(["bundle", "rm", str(place), key[:16]]) == 0
    assert bundles(place) == [keep, other]
    assert main(["bundle", "rm", str(place), key[:16]]) == 1
    assert bundles(place) == [keep, other]


def test_removes_what_is_damaged(place: Path) -> None:
    bad = damage(place)
    assert main(["bundle", "rm", "--damaged", str(place)]) == 0
    assert bad not in bundles(place) and len(bundles(place)) == 2


def test_removes_a_model(place: Path) -> None:
    assert main(["bundle", "rm", "--model", OTHER.fingerprint()[:12], str(place)]) == 0
    assert len(bundles(place)) == 2
    assert main(["bundle", "rm", "--model", "", str(place)]) == 1
    assert len(bundles(place)) == 2


def test_removes_all(place: Path) -> None:
    (place / IDENTITY.rank_name / "notes.txt").write_text("mine")
    assert main(["bundle", "rm", "--all", str(place)]) == 0
    assert bundles(place) == []
    assert (place / IDENTITY.rank_name / "notes.txt").exists()


def test_removes_nothing_from_under_a_server(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = OneRank(place, 1 << 20, IDENTITY, OWN)
    assert main(["bundle", "rm", "--all", str(place)]) == 1
    assert "in use by another process" in capsys.readouterr().err
    assert len(bundles(place)) == 3
    folder.close()


def test_says_what_is_missing(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for action in (["ls"], ["verify"], ["rm", "--all"]):
        assert main(["bundle", *action, str(place / "none")]) == 1
        assert "There is no folder" in capsys.readouterr().err
    assert main(["bundle", "rm", str(place)]) == 2
    assert main(["bundle", "rm", "--all", "--damaged", str(place)]) == 2
    assert len(bundles(place)) == 3
