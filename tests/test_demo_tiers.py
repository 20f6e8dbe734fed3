# SPDX-License-Identifier: Apache-2.0
"""The demo of host memory without a server: turns, outcomes, table and flags."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("httpx")
pytest.importorskip("rich")

from rich.console import Console

from hybrid_plugin import cli
from hybrid_plugin.config import HybridConfig
from hybrid_plugin.tiers.peers import agent
from hybrid_plugin.tools.demo import measure, tiers
from hybrid_plugin.tools.demo.client import Answer
from hybrid_plugin.tools.demo.compare import Tally
from hybrid_plugin.tools.demo.engines import Levels, VllmEngine
from hybrid_plugin.tools.demo.measure import (
    Peaks,
    Run,
    Target,
    continued,
    summarise,
)
from hybrid_plugin.tools.demo.patience import Patience
from hybrid_plugin.tools.demo.report import Outcome, to_json, to_table
from hybrid_plugin.tools.demo.tiers import SERVERS, TiersDemo
from hybrid_plugin.tools.demo.workloads import Message, Workload, returning, split
from hybrid_plugin.tools.prometheus_text import Metrics

CHATS = returning(count=3)


def said(text: str, **more: Any) -> Answer:
    """An answer whose tokens are its letters, without alternatives."""
    tokens = tuple(text)
    return Answer(text, tokens, tuple({one: 0.0} for one in tokens), **more)


class Asked:
    """A client that answers by the last message, and remembers what it was asked."""

    def __init__(self) -> None:
        self.histories: list[Sequence[Message]] = []
        self.patience = Patience()
        self.running = self.most = 0

    async def ask(self, messages: Sequence[Message], max_tokens: int) -> Answer:
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        self.histories.append(list(messages))
        return said(f"answer {len(self.histories)}", prompt_tokens=len(messages))


def turns_of(client: Asked, workload: Workload) -> Sequence[Run]:
    """`measure_turns` on a server that says nothing of itself."""

    async def get(path: str) -> Any:
        return SimpleNamespace(text="")

    @asynccontextmanager
    async def prepared(
        target: Target, *, forget: bool
    ) -> AsyncIterator[tuple[Any, Any]]:
        yield client, SimpleNamespace(get=get)

    target = Target(None, VllmEngine(1), plugin=True)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "_prepared", prepared)
        return measure.measure_turns(target, workload, lambda: None)


def test_chats_fit_the_model_and_are_all_different() -> None:
    chats = returning().conversations
    assert len(chats) == len({c.questions[0].text for c in chats})
    for chat in chats:
        bytes_of = sum(len(q.text.encode()) + 64 for q in chat.questions)
        assert 900 < bytes_of < VllmEngine(1).max_model_len


def test_prompts_for_two_servers_are_nobody_elses() -> None:
    prompts, chats = split().conversations, returning().conversations
    assert all(len(one.questions) == 1 for one in prompts)
    texts = {one.questions[0].text for one in (*prompts, *chats)}
    assert len(texts) == len(prompts) + len(chats)


def test_prompts_for_two_servers_are_long_enough_to_be_read() -> None:
    """Computing a third of such a one was faster than connecting, and so was done."""
    least = max(len(one.questions[0].text) for one in returning().conversations)
    for prompt in split().conversations:
        assert 2 * least < len(prompt.questions[0].text.encode()) < tiers.LONGEST - 256


def test_all_first_questions_come_before_any_second_one() -> None:
    client = Asked()
    runs = turns_of(client, CHATS)
    assert [len(run.answers) for run in runs] == [3, 3, 3]
    assert client.most == CHATS.concurrency
    lengths = [len(history) for history in client.histories]
    assert lengths == [1] * 3 + [3] * 3 + [5] * 3
    for number, chat in enumerate(CHATS.conversations):
        first, second = client.histories[number], client.histories[3 + number]
        assert first == [{"role": "user", "content": chat.questions[0].text}]
        assert second[0] == first[0]
        assert second[1] == {"role": "assistant", "content": f"answer {number + 1}"}
        assert second[2]["content"] == chat.questions[1].text
    assert [run.result.requests for run in runs] == [3, 3, 3]


def test_what_is_left_follows_all_that_was_said() -> None:
    """As if the conversations had not been interrupted."""
    whole, first, rest = Asked(), Asked(), Asked()
    turns_of(whole, CHATS)
    shorter = replace(
        CHATS,
        conversations=tuple(
            replace(one, questions=one.questions[:2]) for one in CHATS.conversations
        ),
    )
    left = continued(CHATS, turns_of(first, shorter))
    assert [len(one.questions) for one in left.conversations] == [1] * 3
    turns_of(rest, left)
    assert [*first.histories, *rest.histories] == whole.histories


def test_what_came_from_the_host_is_counted_by_turns() -> None:
    peaks = Peaks()
    assert peaks.host_hit_tokens is None
    for count in (None, 40, 100):
        peaks.note(Levels(host_hit_tokens=count))
    assert peaks.host_hit_tokens == 100
    later = Peaks()
    for count in (100, 130):
        later.note(Levels(host_hit_tokens=count))
    assert later.host_hit_tokens == 30
    text = """
hybrid_cache_host_hit_tokens_total{engine="0"} 7.0
hybrid_cache_disk_hit_tokens_total{engine="0"} 5.0
hybrid_cache_peer_hit_tokens_total{engine="0"} 3.0
"""
    levels = VllmEngine(1).levels(Metrics(text), plugin=True)
    assert (levels.host_hit_tokens, levels.disk_hit_tokens) == (7, 5)
    assert levels.peer_hit_tokens == 3


def test_only_the_plugin_gets_its_options(tmp_path: Path) -> None:
    options = {"host_memory": 1 << 20}
    engine = VllmEngine(1, plugin_options=options)
    stock, ours = (
        engine.launch(tmp_path, 1, plugin=plugin).command for plugin in (False, True)
    )
    flag = "--additional-config="
    assert not any(one.startswith(flag) for one in stock)
    (given,) = [one.removeprefix(flag) for one in ours if one.startswith(flag)]
    assert HybridConfig.from_mapping(json.loads(given)["hybrid_plugin"]).host_memory
    plain = VllmEngine(1).launch(tmp_path, 1, plugin=True).command
    assert not any(one.startswith(flag) for one in plain)
    assert engine.settings()["plugin_options"] == options


# ------------------------------------------------------------------------ outcomes


def run_of(
    host_tokens: int, *texts: str, disk_tokens: int = 0, peer_tokens: int = 0
) -> Run:
    """A turn with these answers."""
    answers = [[said(text, prompt_tokens=10, cached_tokens=5)] for text in texts]
    peaks = Peaks()
    peaks.note(Levels(host_hit_tokens=0, disk_hit_tokens=0, peer_hit_tokens=0))
    peaks.note(
        Levels(
            host_hit_tokens=host_tokens,
            disk_hit_tokens=disk_tokens,
            peer_hit_tokens=peer_tokens,
        )
    )
    return Run(summarise(returning(3, turns=1), answers, peaks, 1.0), answers)


class Demo:
    """A `TiersDemo` whose servers do not run."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        folder: Path,
        runs: Any,
        split: Any = None,
    ) -> None:
        """Play runs of turns, and runs for a prefill and a decode server, if given."""
        self.text = io.StringIO()
        self.started: list[str] = []
        self.names: list[str] = []
        self.commands: dict[str, Sequence[str]] = {}
        self.forgot: list[bool] = []
        self.out = folder / "build" / "demo-tiers.json"

        def turns(
            target: Target,
            workload: Workload,
            tick: Callable[[], None],
            *,
            forget: bool,
        ) -> Sequence[Run]:
            self.forgot.append(forget)
            if workload.name == "prefill_and_decode":
                return [split[target.server.name]]
            found: Sequence[Run] = runs[target.server.name]
            return found[:2] if forget else found[2:]

        @contextmanager
        def running(targets: Sequence[Target], console: Console) -> Iterator[None]:
            self.started += [
                next((c for c in t.server._launch.command if "additional" in c), "")
                for t in targets
            ]
            self.names += [t.server.name for t in targets]
            self.commands |= {t.server.url: t.server._launch.command for t in targets}
            yield

        monkeypatch.setattr(tiers, "measure_turns", turns)
        monkeypatch.setattr(tiers, "running", running)
        monkeypatch.setattr(VllmEngine, "version", lambda self: "1.2")
        console = Console(file=self.text, width=200)
        self.demo = TiersDemo(
            VllmEngine(16 << 20),
            64 << 20,
            512 << 20,
            folder,
            self.out,
            CHATS,
            console,
            has_nixl=split is not None,
        )


def test_the_outcome_is_that_of_each_turn(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    turns = (("a", "b", "c"), ("x", "y", "z"), ("l", "m", "n"))
    runs = {
        "device": [run_of(0, *texts) for texts in turns],
        "tiers": [
            run_of(0, *turns[0]),
            run_of(12, *turns[1]),
            run_of(0, *turns[2], disk_tokens=9),
        ],
    }
    faked = Demo(monkeypatch, tmp_path, runs)
    assert faked.demo.run()
    data = json.loads(faked.out.read_text())
    assert [one["comparison"]["equal"] for one in data["workloads"]] == [3, 3, 3]
    _, second, last = data["workloads"]
    assert second["tiers"]["host_hit_tokens"] == 12
    assert second["device"]["host_hit_tokens"] == 0
    assert last["tiers"]["disk_hit_tokens"] == 9
    assert data["settings"]["host_bytes"] == 64 << 20
    assert data["settings"]["disk_bytes"] == 512 << 20
    shown = faked.text.getvalue()
    for told in ("second turns", "after a restart", "from the host", "from the disk"):
        assert told in shown


def test_a_restarted_server_has_the_same_files_and_is_not_told_to_forget(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    runs = {name: [run_of(0, "a", "b", "c")] * 3 for name in SERVERS}
    faked = Demo(monkeypatch, tmp_path, runs)
    assert faked.demo.run()
    assert faked.forgot == [True, True, False, False]
    without, before, again, after = faked.started
    assert without == again == "" and before == after
    options = json.loads(before.partition("=")[2])["hybrid_plugin"]
    assert options["host_memory"] == 64 << 20
    assert options["disk"]["size"] == 512 << 20
    assert not Path(options["disk"]["path"]).exists()
    assert faked.names == ["device", "tiers"] * 2


SAME = {name: [run_of(0, "a", "b", "c")] * 3 for name in SERVERS}
"""Turns of which nothing is said."""


def test_a_third_server_computes_prompts_for_the_second_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    through = run_of(0, "x", "y", "z", peer_tokens=27)
    both = {"device": run_of(0, "x", "y", "z"), "router": through}
    faked = Demo(monkeypatch, tmp_path, SAME, both)
    assert faked.demo.run()
    assert faked.forgot == [True, True, False, False, True, True]
    assert faked.names[2:] == ["device", "tiers", "prefill", "router"]
    options = [
        json.loads(one.partition("=")[2])["hybrid_plugin"] if one else None
        for one in faked.started
    ]
    _, before, _, decode, prefill, router = options
    assert router is None and decode == before | {"peers": {}}
    assert prefill == {"host_memory": 64 << 20, "peers": {}}
    (route,) = [one for one in faked.commands.values() if "route" in one]
    urls = {url: command for url, command in faked.commands.items() if command != route}
    asked = dict(one.lstrip("-").split("=", 1) for one in route if "http" in one)
    assert json.dumps(prefill) in "".join(urls[asked["prefill"]])
    assert json.dumps(decode) in "".join(urls[asked["decode"]])
    *_, last = json.loads(faked.out.read_text())["workloads"]
    assert last["name"] == "prefill_and_decode"
    assert last["comparison"]["equal"] == 3
    assert (last["tiers"]["peer_hit_tokens"], last["device"]["peer_hit_tokens"]) == (
        27,
        0,
    )
    shown = faked.text.getvalue()
    assert "prefill, decode" in shown and "from a server" in shown
    assert "NIXL" not in shown


def test_an_answer_of_two_servers_that_differs_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    both = {"device": run_of(0, "x", "y", "z"), "router": run_of(0, "x", "Y", "z")}
    faked = Demo(monkeypatch, tmp_path, SAME, both)
    assert not faked.demo.run()
    shown = faked.text.getvalue()
    told = "prefill_and_decode: 1 answers differ from the device alone by more than a"
    assert shown.count(told) == 1 and shown.count("answers differ") == 1


def test_without_nixl_the_demo_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    faked = Demo(monkeypatch, tmp_path, SAME)
    assert faked.demo.run()
    shown = faked.text.getvalue()
    assert shown.count(f"uv pip install --python {sys.executable} nixl-cu12") == 1
    assert "prefill, decode" not in shown
    assert len(json.loads(faked.out.read_text())["workloads"]) == 3
    monkeypatch.setattr(agent, "_PACKAGES", ("no_such_package",))
    assert not agent.is_installed()
    monkeypatch.setattr(agent, "_PACKAGES", ("no_such_package", "json"))
    assert agent.is_installed()


def test_an_answer_that_differs_is_a_failure_and_ends_the_comparison(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    last = run_of(0, "l", "m", "n")
    runs = {
        "device": [run_of(0, "a", "b", "c"), run_of(0, "x", "y", "z"), last],
        "tiers": [run_of(0, "a", "B", "c"), run_of(0, "x", "Y", "Z"), last],
    }
    faked = Demo(monkeypatch, tmp_path, runs)
    assert not faked.demo.run()
    first, second, third = json.loads(faked.out.read_text())["workloads"]
    assert third["comparison"]["not_compared"] == 2
    assert first["comparison"] | {"worst_gap": 0} == {
        **{"equal": 2, "near_ties": 0, "wrong": 1, "not_compared": 0},
        **{"worst_gap": 0, "near_tie_bound_nats": 0.75},
    }
    assert second["comparison"]["not_compared"] == 1
    assert (second["comparison"]["equal"], second["comparison"]["wrong"]) == (1, 1)
    told = "1 answers differ from the device alone by more than a near tie."
    assert faked.text.getvalue().count(told) == 2


def test_the_table_and_the_json_name_the_servers() -> None:
    result = run_of(3, "a", "b", "c").result
    outcome = Outcome(CHATS, result, result, Tally(equal=3))
    console = Console(file=io.StringIO(), width=200)
    console.print(to_table("t", [outcome], "a page is a page", SERVERS))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "device" in shown and "tiers" in shown and "stock" not in shown
    (workload,) = to_json("e", "v", [outcome], {}, SERVERS)["workloads"]
    assert workload["device"] == workload["tiers"]


# ----------------------------------------------------------------------------- cli


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--engine", "sglang"], "--tiers needs vLLM: leave --engine out.\n"),
        (
            ["--speculate"],
            "--tiers has no stock server, and no drafts: leave --stock-flag and "
            "--speculate out.\n",
        ),
        (
            ["--stock-flag=--x"],
            "--tiers has no stock server, and no drafts: leave --stock-flag and "
            "--speculate out.\n",
        ),
    ],
)
def test_flags_that_do_not_go_together(
    flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["demo", "--tiers", *flags]) == 2
    assert capsys.readouterr().err == told


def test_sizes_are_those_of_the_flags(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: list[TiersDemo] = []

    def run(self: TiersDemo) -> bool:
        made.append(self)
        return True

    monkeypatch.setattr(TiersDemo, "run", run)
    flags = ["--model", str(tmp_path), "--cache-mib", "8", "--host-mib", "32"]
    assert cli.main(["demo", "--tiers", *flags, "--disk-mib", "64"]) == 0
    (demo,) = made
    assert (demo.engine.cache_bytes, demo.host_bytes) == (8 << 20, 32 << 20)
    assert demo.disk_bytes == 64 << 20
    assert demo.engine.max_model_len == tiers.LONGEST
    assert demo.out == Path("build", "demo-tiers.json")
