# SPDX-License-Identifier: Apache-2.0
"""What a real SGLang had cached is on disk when its server is started again."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hybrid_plugin.tiers.failure import Reason
from hybrid_plugin.tools.demo.compare import NEAR_TIE
from tests.engines import slow_decay
from tests.engines.bundle_files import files_of, flip_a_bit_in_each, zero_states
from tests.engines.compare import compare
from tests.engines.conftest import StartServer
from tests.engines.drivers.driver import MODEL
from tests.engines.greedy import gaps
from tests.engines.messages import Answer, Ask
from tests.engines.server import Server
from tests.engines.sessions import call, save_chats
from tests.engines.test_host_memory_sglang import (
    CHATS,
    NOTHING,
    SETUPS,
    ask,
    first_turns,
)
from tests.engines.test_mtp_sglang import FLAGS as DRAFTING
from tests.engines.test_pressure import wait_until_idle
from tests.engines.traffic import next_turns

pytest.importorskip("sglang")
pytestmark = pytest.mark.engine

FIXED, ELASTIC = SETUPS.values()
TWO_RANKS: Mapping[str, Any] = {
    "flags": ("--tp-size=2",),
    "environment": {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
}


@dataclass
class Filled:
    """A folder of files, and what the second turns should say."""

    folder: Path
    second: list[Ask] = field(default_factory=list)
    expected: list[Answer] = field(default_factory=list)
    """Of the stock engine, without a cache."""


def on_disk(
    setup: Mapping[str, Any], folder: Path, size: str = "1GiB"
) -> dict[str, Any]:
    """A setup with files behind its host memory."""
    disk = {"path": str(folder), "size": size}
    return {**setup, "options": {**setup["options"], "disk": disk}}


def wait_until_written(server: Server) -> dict[str, float]:
    """What is noted for writing is written one after the other."""
    before = -1.0
    for _ in range(120):
        levels = server.metrics()
        if levels["disk_stores"] == before:
            return levels
        before = levels["disk_stores"]
        time.sleep(1.0)
    raise AssertionError("it goes on writing")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In float32, so that equal computation gives equal tokens."""
    return slow_decay.write_nemotron_h(tmp_path_factory.mktemp("model") / "nemotron-h")


@pytest.fixture(scope="module")
def filled(
    model: Path, start_server: StartServer, tmp_path_factory: pytest.TempPathFactory
) -> Filled:
    """First turns of twelve chats, on disk after the server's end."""
    found = Filled(tmp_path_factory.mktemp("disk") / "bundles")
    first = first_turns()
    with start_server(
        "stock", plugin=False, prefix_cache=False, dtype="float32", model=model
    ) as stock:
        answers = ask(stock, first)
        found.second = next_turns(first, answers, seed=2)
        found.expected = ask(stock, found.second)
    setup = on_disk(FIXED, found.folder)
    with start_server("filling", dtype="float32", model=model, **setup) as server:
        outcome = compare(answers, ask(server, first), 0.0)
        levels = wait_until_written(server)
        assert server.is_alive()
    print(levels)
    assert outcome.wrong == () and outcome.compared == CHATS
    assert levels["disk_stores"] >= CHATS
    assert not failures(levels)
    assert len(files_of(found.folder)) == levels["disk_stores"]
    return found


@pytest.fixture
def copied(filled: Filled, tmp_path: Path) -> Filled:
    """A copy that a test may break, and a server write to."""
    shutil.copytree(filled.folder, tmp_path / "bundles")
    return Filled(tmp_path / "bundles", filled.second, filled.expected)


@contextmanager
def returned(
    start: StartServer,
    model: Path,
    filled: Filled,
    setup: Mapping[str, Any] = FIXED,
    size: str = "1GiB",
    before: Callable[[Server], None] = lambda server: None,
) -> Iterator[tuple[Server, list[Answer], dict[str, float]]]:
    """A new server, asked the second turns."""
    setup = on_disk(setup, filled.folder, size)
    with start("returned", dtype="float32", model=model, **setup) as server:
        before(server)
        answers = ask(server, filled.second)
        levels = wait_until_idle(server)
        print(levels)
        yield server, answers, levels


def hits(answers: Sequence[Answer]) -> float:
    """Share of the prompts that was not computed."""
    whole = sum(answer.prompt_tokens for answer in answers)
    return sum(answer.cached_tokens for answer in answers) / whole


def failures(levels: Mapping[str, float]) -> dict[str, float]:
    """Writes and fetches that failed, by reason."""
    return {name: n for name, n in levels.items() if "_failures{" in name}


def is_free(levels: Mapping[str, float]) -> None:
    """Nothing is in use that no request uses."""
    for pool in ("kv", "state", "host.kv", "host.state"):
        assert levels[f"{pool}{{used}}"] == 0, pool


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_a_server_that_was_started_again_resumes_from_disk(
    model: Path, start_server: StartServer, copied: Filled, setup: Mapping[str, Any]
) -> None:
    with returned(start_server, model, copied, setup) as (server, answers, levels):
        wait_until_written(server)
        server.reset_prefix_cache()
        is_free(wait_until_idle(server))
        again = ask(server, copied.second[-1:])
    outcome = compare(copied.expected, answers, 0.0)
    assert outcome.wrong == () and outcome.compared == CHATS
    assert hits(answers) > 0.75
    prompts = sum(answer.prompt_tokens for answer in answers)
    assert levels["disk_hit_tokens"] > 0.5 * prompts
    assert levels["disk_loads"] > CHATS / 2
    from_disk = [answer.cached_from.get("storage", 0) for answer in answers]
    assert sum(from_disk) == levels["disk_hit_tokens"]
    assert not failures(levels)
    assert again[0].cached_tokens == 0, "a flush forgets what is on disk as well"
    assert compare(copied.expected[-1:], again, 0.0).wrong == ()


def test_files_with_a_flipped_bit_are_computed_anew(
    model: Path, start_server: StartServer, copied: Filled
) -> None:
    flip_a_bit_in_each(copied.folder)
    with returned(start_server, model, copied) as (_, answers, levels):
        is_free(levels)
    outcome = compare(copied.expected, answers, 0.0)
    assert outcome.wrong == () and outcome.compared == CHATS
    assert failures(levels).keys() == {f"disk_load_failures{{{Reason.CORRUPT}}}"}
    assert sum(failures(levels).values()) > CHATS / 2
    assert levels["disk_hit_tokens"] == levels["disk_loads"] == 0
    assert hits(answers) < 0.1


def test_answers_change_when_states_on_disk_are_zeroed(
    model: Path, start_server: StartServer, copied: Filled
) -> None:
    """Negative control: the comparison does see a wrong state that was fetched."""
    assert zero_states(copied.folder) >= CHATS
    with returned(start_server, model, copied) as (_, answers, levels):
        pass
    assert levels["disk_loads"] > CHATS / 2
    assert len(compare(copied.expected, answers, 0.0).wrong) > CHATS / 2


def test_a_disk_for_a_few_bundles_keeps_to_its_size(
    model: Path, start_server: StartServer, copied: Filled
) -> None:
    sizes = [file.stat().st_size for file in files_of(copied.folder)]
    size = 3 * max(sizes)
    with returned(start_server, model, copied, size=str(size)) as (server, *seen):
        answers, _ = seen
        levels = wait_until_written(server)
        held = [file.stat().st_size for file in files_of(copied.folder)]
    assert compare(copied.expected, answers, 0.0).wrong == ()
    assert 0 < sum(held) <= size
    assert levels["disk_used_bytes"] == sum(held)
    assert levels["disk_stores"] > 0


def other_weights(model: Path, folder: Path) -> None:
    """Another model of the same configuration."""
    slow_decay.write_nemotron_h(folder, seed=1)


def other_configuration(model: Path, folder: Path) -> None:
    """The same files, and one number changed in the configuration."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    config["layer_norm_epsilon"] = 1e-3
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("write", [other_weights, other_configuration])
def test_nothing_is_found_of_another_model(
    model: Path,
    start_server: StartServer,
    copied: Filled,
    tmp_path: Path,
    write: Callable[[Path, Path], None],
) -> None:
    other = tmp_path / "other"
    write(model, other)
    with returned(start_server, other, copied) as (_, answers, levels):
        pass
    assert levels["disk_hit_tokens"] == levels["disk_loads"] == 0
    assert max(gaps(other, copied.second, answers)) < NOTHING


def test_ranks_agree_on_what_the_disk_has(
    model: Path, start_server: StartServer, filled: Filled, tmp_path: Path
) -> None:
    """Each reads its own files, and they go on when all have them: or none has.

    Sessions are theirs together, too.
    """
    first = first_turns()
    setup = on_disk({**FIXED, **TWO_RANKS}, tmp_path / "bundles")
    with start_server("ranks", dtype="float32", model=model, **setup) as server:
        saved = save_chats(server.url, first, ask(server, first))
        levels = wait_until_written(server)
    assert len(list(tmp_path.rglob("*.session"))) == 2 * CHATS
    files = files_of(tmp_path / "bundles")
    assert len(files) == 2 * levels["disk_stores"] >= 2 * CHATS
    of_the_second = [file for file in files if "rank-1-of-2" in str(file)]
    assert len(of_the_second) == len(files) / 2
    of_the_second[0].unlink()  # it is not to be found then
    torn = of_the_second[1]
    torn.write_bytes(torn.read_bytes()[:-3])
    again = Filled(tmp_path / "bundles", filled.second)

    def load(server: Server) -> None:
        found = {
            name: call(server.url, "POST", f"/{name.replace(' ', '%20')}/load")
            for name in saved
        }
        whole = [one.json().get("tokens") == saved[name] for name, one in found.items()]
        assert CHATS - 2 <= sum(whole) < CHATS
        assert {one.status_code for one in found.values()} <= {200, 410}

    setup = {**FIXED, **TWO_RANKS}
    with returned(start_server, model, again, setup, before=load) as seen:
        _, answers, levels = seen
        is_free(levels)
    assert max(gaps(model, filled.second, answers)) < NOTHING
    assert hits(answers) > 0.5
    assert levels["disk_loads"] > CHATS / 3


def test_windows_come_back_from_disk(start_server: StartServer, tmp_path: Path) -> None:
    model = slow_decay.write_laguna(tmp_path / "model")
    asks = first_turns()
    folder = tmp_path / "bundles"
    setup = on_disk(FIXED, folder)
    with start_server("windows", dtype="float32", model=model, **setup) as server:
        answers = ask(server, asks)
        wait_until_written(server)
    again = Filled(folder, next_turns(asks, answers, seed=2))
    with returned(start_server, model, again) as (_, answers, levels):
        pass
    assert max(gaps(model, again.second, answers)) < NOTHING
    assert levels["disk_loads"] > CHATS / 2 and hits(answers) > 0.75


def test_the_kv_of_a_draft_model_comes_back_with_its_pages(
    start_server: StartServer, tmp_path: Path
) -> None:
    """Gated delta nets in bfloat16, and a server that sleeps when nothing is out."""
    asks = first_turns()
    flags = (*DRAFTING, "--sleep-on-idle")
    setup = on_disk({**FIXED, "flags": flags}, tmp_path / "bundles")
    with start_server("drafts", **setup) as server:
        answers = ask(server, asks)
        wait_until_written(server)
    second = next_turns(asks, answers, seed=2)
    with start_server("drafts again", **setup) as server:
        answers = ask(server, second)
        levels = wait_until_idle(server)
    print(levels)
    assert max(gaps(MODEL, second, answers)) < NEAR_TIE
    assert levels["disk_loads"] > CHATS / 2 and hits(answers) > 0.75
    assert not failures(levels)
