# SPDX-License-Identifier: Apache-2.0
"""The file of a session, and what can be its name."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_plugin.tiers.failure import Failure, Reason
from hybrid_plugin.tiers.saved_session import (
    FORMAT,
    MAX_NAME,
    SavedSession,
    check_name,
    key_of,
)
from tests.tiers.support import IDENTITY, as_tokens

SESSION = SavedSession(
    name="tea",
    fingerprint=IDENTITY.fingerprint(),
    namespace="a" * 64,
    tokens=as_tokens(1, 2, 1 << 40),
    keys=("b" * 64, "c" * 64),
    size=12_345,
    created=1_700_000_000,
    model="a model",
    engine="an engine",
)
PATHS = ("../../etc/passwd", "/", "a/b", ".", "..", "~", "rank-0-of-1", "con", "-rf")


def test_comes_back_as_it_was() -> None:
    assert SavedSession.from_text(SESSION.as_text()) == SESSION


@pytest.mark.parametrize(
    "name", [*PATHS, "ü", "茶", "🫖", "a b", '"', "\\", "x" * MAX_NAME]
)
def test_whatever_it_is_called_its_file_is_called_by_a_hash(name: str) -> None:
    session = replace(SESSION, name=name)
    assert len(session.key) == 64 and set(session.key) <= set("0123456789abcdef")
    assert SavedSession.from_text(session.as_text()) == session
    assert session.as_text().isascii()


@pytest.mark.parametrize(
    "name", ["", "x" * 10_000, "a\nb", "\x00", "\x1b[2J", "\ud800", "a\u202eb", "\t"]
)
def test_what_is_no_name(name: str) -> None:
    with pytest.raises(ValueError, match="1 to 256 printable characters"):
        check_name(name)
    with pytest.raises(ValueError, match="printable"):
        replace(SESSION, name=name)


@given(st.text(min_size=1, max_size=MAX_NAME))
def test_any_text_is_a_name_or_none(name: str) -> None:
    try:
        check_name(name)
    except ValueError:
        assert not name.isprintable()
    else:
        assert len(key_of(SESSION.fingerprint, name)) == 64


def test_models_have_names_of_their_own() -> None:
    other = replace(IDENTITY, config="1" * 64).fingerprint()
    assert key_of(other, "tea") != SESSION.key == key_of(SESSION.fingerprint, "tea")


def changed(**fields: Any) -> str:
    return json.dumps(json.loads(SESSION.as_text()) | fields)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", Reason.MALFORMED),
        ("[]", Reason.MALFORMED),
        ("null", Reason.MALFORMED),
        ("[" * 100_000, Reason.MALFORMED),
        (SESSION.as_text()[:-1], Reason.MALFORMED),
        (SESSION.as_text().replace("tea", "tee"), Reason.CORRUPT),
        (changed(format=FORMAT + "1"), Reason.VERSION),
        (changed(size=-1), Reason.CORRUPT),
        (changed(tokens=[]), Reason.CORRUPT),
        (changed(checksum=3), Reason.MALFORMED),
    ],
)
def test_what_is_no_session(content: str, reason: Reason) -> None:
    found = SavedSession.from_text(content)
    assert isinstance(found, Failure) and found.reason == reason


@pytest.mark.parametrize(
    "fields",
    [
        {"size": -1},
        {"tokens": as_tokens()},
        {"keys": ()},
        {"keys": ("../" * 20 + "abcd",)},
        {"fingerprint": "F" * 64},
        {"namespace": ""},
    ],
)
def test_contents_that_contradict_each_other(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"."):
        replace(SESSION, **fields)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tokens", [1, "2"]),
        ("tokens", [1 << 64]),
        ("tokens", [True]),
        ("tokens", 3),
        ("keys", [3]),
        ("name", ""),
        ("created", 1.5),
        ("engine", None),
    ],
)
def test_wrong_values_with_a_right_checksum(name: str, value: Any) -> None:
    from hybrid_plugin.tiers.saved_session import _checksum

    fields = json.loads(SESSION.as_text()) | {name: value}
    del fields["checksum"]
    text = json.dumps(fields | {"checksum": _checksum(fields)})
    found = SavedSession.from_text(text)
    assert isinstance(found, Failure) and found.reason == Reason.MALFORMED


@given(st.integers(0, 10_000), st.integers(1, 127))
def test_no_flipped_bit_goes_unnoticed(place: int, bits: int) -> None:
    content = bytearray(SESSION.as_text().encode())
    content[place % len(content)] ^= bits
    found = SavedSession.from_text(content.decode(errors="replace"))
    assert isinstance(found, Failure)
