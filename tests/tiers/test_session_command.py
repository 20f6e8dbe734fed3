# SPDX-License-Identifier: Apache-2.0
"""`hybrid-plugin session`, on a folder and towards a server that is none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from hybrid_plugin.cli import main
from hybrid_plugin.tiers.shelf import RECORD, SUFFIX
from tests.tiers.test_session_files import OTHER, Server, saved


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """With sessions "tea", of two bundles, and "ten", of the first of them."""
    made = Server(tmp_path)
    saved(made)
    assert made.save(made.session(10, "ten", created=2))
    yield made
    made.folder.close()


def files(path: Path, suffix: str) -> int:
    return len(list(path.rglob("*" + suffix)))


def other_model(path: Path) -> None:
    """Have another model save a session "tea" as well."""
    made = Server(path, identity=OTHER)
    assert made.store(15)
    assert made.save(replace(made.session(15, created=3), model="another"))
    made.folder.close()


def test_lists_what_a_folder_has(
    tmp_path: Path, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside a server that has it open."""
    assert main(["session", "ls", "--folder", str(tmp_path)]) == 0
    first, second, total = capsys.readouterr().out.splitlines()
    assert first.startswith("tea  20 tokens  ") and first.endswith("engine  model")
    assert second.startswith("ten  10 tokens")
    assert total.startswith("2 sessions keep ")
    assert main(["session", "ls", "--json", "--folder", str(tmp_path)]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [(one["name"], one["on_disk"]) for one in listed] == [
        ("tea", 20),
        ("ten", 10),
    ]
    assert "tokens" in listed[0] and isinstance(listed[0]["tokens"], int)


def test_a_session_whose_files_are_gone_says_so(
    tmp_path: Path, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    last = server.session(20).keys[1]
    next(tmp_path.rglob(last + SUFFIX)).unlink()  # of one rank
    assert main(["session", "ls", "--folder", str(tmp_path)]) == 0
    assert "tea  20 tokens, 10 of them on disk" in capsys.readouterr().out


def test_removes_what_nothing_else_needs(
    tmp_path: Path, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["session", "rm", "tea", "--folder", str(tmp_path)]
    assert main(command) == 1 and "in use by another" in capsys.readouterr().err
    server.folder.close()
    assert main(command) == 0 and "Removed 'tea'" in capsys.readouterr().out
    assert (files(tmp_path, RECORD), files(tmp_path, SUFFIX)) == (2, 2)
    assert main(command) == 1
    assert "There is no session 'tea'" in capsys.readouterr().err
    assert main(["session", "rm", "ten", "--folder", str(tmp_path)]) == 0
    assert (files(tmp_path, RECORD), files(tmp_path, SUFFIX)) == (0, 0)


def test_bundles_that_sessions_keep_stay(
    tmp_path: Path, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.folder.close()
    other_model(tmp_path)
    only = Server(tmp_path, identity=OTHER)
    assert only.store(18)  # behind the session, so nothing keeps its last bundle
    only.folder.close()
    command = ["bundle", "rm", str(tmp_path), "--all"]
    before = files(tmp_path, SUFFIX), files(tmp_path, RECORD)
    assert before == (8, 6)
    assert main(command) == 0
    assert capsys.readouterr().out == (
        "Removed 2 of 8 bundles.\n6 stay, which saved sessions keep: remove the "
        "sessions, or give --with-sessions.\n"
    )
    assert main([*command[:-1], server.session(20).keys[1]]) == 1, "nothing went"
    assert main(["session", "ls", "--folder", str(tmp_path)]) == 0
    assert "of them on disk" not in capsys.readouterr().out
    assert main([*command[:-1], server.session(20).keys[1], "--with-sessions"]) == 0
    assert (files(tmp_path, SUFFIX), files(tmp_path, RECORD)) == (4, 4)
    assert main([*command, "--with-sessions"]) == 0
    assert (files(tmp_path, SUFFIX), files(tmp_path, RECORD)) == (0, 0)


def test_what_cannot_be_read_goes_whatever_keeps_it(
    tmp_path: Path, server: Server
) -> None:
    server.folder.close()
    bad = next(tmp_path.rglob(server.session(20).keys[1] + SUFFIX))
    content = bytearray(bad.read_bytes())
    content[-1] ^= 1
    bad.write_bytes(content)
    assert main(["bundle", "rm", str(tmp_path), "--damaged"]) == 0
    assert not bad.exists()
    assert (files(tmp_path, SUFFIX), files(tmp_path, RECORD)) == (3, 4)


def test_of_several_models_one_is_named(
    tmp_path: Path, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.folder.close()
    other_model(tmp_path)
    command = ["session", "rm", "tea", "--folder", str(tmp_path)]
    assert main(command) == 1
    assert "Several models have a session 'tea'" in capsys.readouterr().err
    assert main([*command, "--model", "another"]) == 0
    assert main(["session", "ls", "--folder", str(tmp_path)]) == 0
    assert "another" not in capsys.readouterr().out
    assert main([*command, "--model", "nobody"]) == 1
    assert main(command) == 0


def test_a_folder_that_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["session", "ls", "--folder", str(tmp_path / "none")]) == 1
    assert "There is no folder" in capsys.readouterr().err
    assert main(["session", "ls", "--folder", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("0 sessions keep")


class Sent:
    """What goes to a server, and what it answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.requests: list[tuple[str, str, Any, Any]] = []
        self.answer = httpx.Response(200, json={})
        monkeypatch.setattr(httpx, "request", self._request)

    def _request(
        self, method: str, url: str, *, json: Any, headers: Any, timeout: Any
    ) -> httpx.Response:
        self.requests.append((method, url, json, headers))
        return self.answer


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    return Sent(monkeypatch)


PLACE = "http://localhost:8000/v1/hybrid/sessions"


@pytest.mark.parametrize(
    ("content", "body"),
    [
        ({"messages": [1], "model": "m"}, {"messages": [1], "model": "m"}),
        ([{"role": "user"}], {"messages": [{"role": "user"}]}),
        ([1, 2], {"prompt": [1, 2]}),
    ],
)
def test_a_body_is_read_from_a_file(
    sent: Sent,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: Any,
    body: Any,
) -> None:
    file = tmp_path / "body.json"
    file.write_text(json.dumps(content))
    told = {"name": "a", "tokens": 12, "given": 13, "bytes": 1 << 30}
    sent.answer = httpx.Response(200, json=told)
    assert main(["session", "save", "../a b", "--body", str(file)]) == 0
    assert capsys.readouterr().out == "Saved 12 of 13 tokens as 'a', 1.00 GiB.\n"
    assert sent.requests == [("POST", PLACE + "/%2E%2E%2Fa%20b/save", body, {})]


@pytest.mark.parametrize("content", ["", "3", "[]", "{"])
def test_a_body_that_is_none(
    sent: Sent, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    file = tmp_path / "body.json"
    file.write_text(content)
    assert main(["session", "save", "a", "--body", str(file)]) == 1
    assert capsys.readouterr().err.startswith(f"{file}: ") and not sent.requests
    assert main(["session", "save", "a", "--body", str(tmp_path / "none")]) == 1


def test_salt_adapter_and_key_go_along(
    sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent.answer = httpx.Response(200, json={"name": "a", "tokens": 1, "saved": 1})
    monkeypatch.setenv("OPENAI_API_KEY", "from the environment")
    options = ["--salt", "s", "--adapter", "poet", "--url", "http://host:1/"]
    assert main(["session", "load", "a", *options]) == 0
    assert main(["session", "load", "a", "--api-key", "given"]) == 0
    first, second = sent.requests
    assert first == (
        "POST",
        "http://host:1/v1/hybrid/sessions/a/load",
        {"cache_salt": "s", "model": "poet"},
        {"Authorization": "Bearer from the environment"},
    )
    assert second[3] == {"Authorization": "Bearer given"}


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (httpx.Response(409, json={"error": "no disk"}), "no disk (409)"),
        (httpx.Response(404, json={"detail": "Not Found"}), "needs hybrid-plugin"),
        (httpx.Response(502, text="<html>"), "The server answered 502."),
        (httpx.Response(200, json=[1]), "The server answered 200."),
    ],
)
def test_what_goes_wrong_is_said(
    sent: Sent, capsys: pytest.CaptureFixture[str], answer: httpx.Response, words: str
) -> None:
    sent.answer = answer
    assert main(["session", "rm", "a"]) == 1
    assert words in capsys.readouterr().err


def test_a_server_that_does_not_answer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["session", "ls", "--url", "http://127.0.0.1:9"]) == 1
    assert "does not answer" in capsys.readouterr().err
