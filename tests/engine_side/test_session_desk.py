# SPDX-License-Identifier: Apache-2.0
"""Orders about sessions: what becomes of them, and what is said where nothing can."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.commands import Command, Discard, Fetch, Write, WriteRecord
from hybrid_plugin.core.memory.pools import PagePool, SlotPool
from hybrid_plugin.core.policy.snapshot_positions import SnapshotPolicy
from hybrid_plugin.core.tiers.host_tier import HostTier
from hybrid_plugin.engine.session_desk import (
    MOST_ANSWERS,
    Answer,
    Serving,
    SessionDesk,
    opening,
    without_disk,
)
from hybrid_plugin.tiers.bundle import Layouts
from hybrid_plugin.tiers.disk import DiskTier
from hybrid_plugin.tiers.failure import Reason
from hybrid_plugin.tiers.keys import BundleName
from hybrid_plugin.tiers.saved_session import SavedSession
from hybrid_plugin.tiers.session_book import SessionBook
from tests.core.audit import audit
from tests.core.support import ByMinimum, Tokens, serve, span
from tests.core.test_outer_tier import PLAN, RATES
from tests.tiers.support import IDENTITY, STATE, page_layout

CHAT = span(0, 10)
TURN = (*CHAT, 100, 101, 102)
"""All tokens of a chat, of which the last was not computed."""
NEXT = (*TURN, 103, 104)
LATER = (*span(200, 210), 300, 301, 302)
FILE = 4_500
"""A little more than the bytes of a small file."""


class Server:
    """A cache with a disk, and one rank that does at once what it is told."""

    def __init__(
        self,
        budget: int = 20 * FILE,
        sessions: tuple[SavedSession, ...] = (),
        files: Mapping[str, Any] | None = None,
    ) -> None:
        self.cache = HybridCache(
            PagePool(33),
            SlotPool(9),
            4,
            SnapshotPolicy(4, 1_000_000),
            eviction=ByMinimum(1),
            host=HostTier(PLAN, 4, ByMinimum()),
            rates=replace(RATES),
        )
        layouts = {IDENTITY.rank_name: Layouts({"kv": page_layout(4)}, STATE)}
        entries = () if files is None else files.values()
        self.tier = DiskTier(entries, budget, IDENTITY, layouts, 1e9)
        self.cache.lower_tiers.use_outer([self.tier])
        book = SessionBook(self.tier, sessions, 1)
        serving = Serving("model", "engine")
        self.desk = SessionDesk(self.cache, self.tier, book, serving)
        self.records: dict[str, str] = {}
        self.bundles: set[str] = set()
        self.ran: list[Command] = []
        """All commands."""
        self.fails: dict[type, str] = {}
        """Reasons for which commands of a kind fail."""

    def step(self) -> None:
        """A step: commands, what ranks did, and what the desk makes of it."""
        self.desk.step()
        for command in self.cache.drain_commands():
            self.ran.append(command)
            match command:
                case Discard(keys):
                    self.bundles -= {BundleName.from_text(key).key for key in keys}
                case Write(ticket, rows) if self._report(command, ticket):
                    self.bundles.add(BundleName.from_text(rows.key).key)
                case Fetch(ticket):
                    self._report(command, ticket)
                case WriteRecord(ticket, name, text) if self._report(command, ticket):
                    self.records.pop(name, None)
                    if text is not None:
                        self.records[name] = text

    def _report(self, command: object, ticket: int) -> bool:
        reason = self.fails.get(type(command))
        if reason is None:
            self.cache.lower_tiers.done(ticket, True)
        else:
            bundle = 0 if isinstance(command, Fetch) else None
            self.cache.lower_tiers.done(ticket, False, reason=reason, bundle=bundle)
        self.desk.step()
        return reason is None

    def take(self, action: str, namespace: Any = None, **order: Any) -> Answer:
        """Take an order, and poll until it is over."""
        answer = self.desk.take({"action": action, **order}, namespace)
        for _ in range(50):
            if "ticket" not in answer:
                json.dumps(answer)
                return answer
            self.step()
            poll = {"action": "poll", "ticket": answer["ticket"]}
            answer = self.desk.take(poll, None)
        raise AssertionError(f"{action} goes on")

    def save(self, name: str = "tea", tokens: Tokens = TURN, **more: Any) -> Answer:
        return self.take("save", name=name, tokens=list(tokens), created=7, **more)

    def chat(self, tokens: Tokens = TURN, namespace: Any = None) -> None:
        """Serve a chat, and let what is written be written."""
        prompt, answer = tokens[:10], tokens[10:]
        serve(self.cache, f"r{tokens[0]}", prompt, answer, namespace=namespace)
        self.step()
        self.step()

    def forget(self) -> None:
        """Evict all but files."""
        assert self.cache.host is not None
        memories = self.cache.memory, self.cache.host.memory
        while any(memory.evict_pages(1_000) for memory in memories):
            pass

    def restarted(self, budget: int = 20 * FILE) -> Server:
        """A server on the same files."""
        sessions = map(SavedSession.from_text, self.records.values())
        found = tuple(one for one in sessions if isinstance(one, SavedSession))
        assert len(found) == len(self.records)
        files = {entry.name.key: entry for entry in self.tier._index.oldest()}
        assert files.keys() == self.bundles
        return Server(budget, found, files)

    def listed(self) -> dict[str, int]:
        """Tokens on disk by the names of sessions."""
        found = self.take("list")["sessions"]
        return {one["name"]: one["on_disk"] for one in found}


def is_refused(answer: Answer, status: int, words: str) -> bool:
    return answer["status"] == status and words in answer["error"]


def test_a_session_is_saved_and_loaded_by_the_next_server() -> None:
    server = Server()
    server.chat()
    saved = server.save()
    assert (saved["status"], saved["tokens"], saved["given"]) == (200, 12, 13)
    assert (saved["model"], saved["engine"], saved["created"]) == ("model", "engine", 7)
    assert saved["bytes"] == server.tier.used_bytes - len(*server.records.values())
    server = server.restarted()
    assert server.listed() == {"tea": 12}
    assert server.cache.lower_tiers.resumable(TURN) == 0
    loaded = server.take("load", name="tea")
    assert loaded == {"status": 200, "name": "tea", "tokens": 12, "saved": 12}
    assert server.cache.lower_tiers.resumable(NEXT) == 12
    assert server.take("load", name="tea") == loaded, "it is there"
    audit(server.cache)


def test_what_was_not_written_yet_is_written_for_it() -> None:
    server = Server()
    serve(server.cache, "chat", CHAT, TURN[10:])
    assert server.save()["tokens"] == 12
    assert len(server.bundles) == 1 and not server.desk.is_busy


def test_nothing_is_saved_that_is_not_cached() -> None:
    server = Server()
    assert is_refused(server.save(), 404, "nothing of this is cached")
    server.chat()
    assert is_refused(server.save(tokens=LATER), 404, "nothing of this is cached")
    assert is_refused(server.save(namespace="salt"), 404, "nothing of this is cached")
    assert server.listed() == {}


def test_saved_sessions_are_not_evicted_by_others() -> None:
    server = Server(budget=3 * FILE)
    server.chat()
    assert server.save()["status"] == 200
    for first in range(1000, 1400, 20):
        server.chat((*span(first, first + 10), 1, 2, 3))
        assert server.tier.used_bytes <= server.tier.budget
    server.forget()
    assert server.take("load", name="tea")["tokens"] == 12


def test_a_session_makes_no_room_for_itself_of_what_it_keeps() -> None:
    """On a full disk whose oldest bundle is its own."""
    server = Server()
    for tokens in (TURN, LATER, (*span(1000, 1010), 1, 2, 3)):
        server.chat(tokens)
    server.tier._budget = server.tier.used_bytes + 100
    assert server.save()["status"] == 200
    assert server.listed() == {"tea": 12}
    server.forget()
    assert server.take("load", name="tea")["tokens"] == 12


def test_a_session_is_refused_where_all_else_is_kept() -> None:
    server = Server()
    server.chat()
    assert server.save("one")["status"] == 200
    server.chat(LATER)
    server.tier._budget = server.tier.used_bytes + 100
    assert is_refused(server.save("two", LATER), 507, "disk.size")
    assert server.listed() == {"one": 12}
    assert server.tier.pinned_bytes < server.tier.used_bytes, "it is held no more"


def test_a_session_that_does_not_fit_is_refused() -> None:
    server = Server(budget=FILE + 1_500)
    server.chat()
    assert server.save()["status"] == 200
    server.chat(LATER)
    refused = server.save("two", LATER)
    assert is_refused(refused, 507, "sessions keep")
    assert server.listed() == {"tea": 12}
    assert server.save("again")["status"] == 200, "what is there takes no room"
    server.take("remove", name="again")
    server.take("remove", name="tea")
    server.forget()
    server.chat(LATER)
    assert server.save("two", LATER)["status"] == 200


def test_a_name_that_is_saved_again_stands_for_the_new_turn() -> None:
    server = Server()
    server.chat()
    server.save()
    serve(server.cache, "next", NEXT, (105, 106))
    server.step()
    turn = (*NEXT, 105, 106)
    assert server.save(tokens=turn)["tokens"] == len(turn) - 1
    assert server.listed() == {"tea": len(turn) - 1} and len(server.records) == 1
    server = server.restarted()
    server.take("load", name="tea")
    assert server.cache.lower_tiers.resumable(turn) == len(turn) - 1


def test_a_longer_talk_is_saved_as_far_as_it_is_cached() -> None:
    server = Server()
    server.chat()
    saved = server.save(tokens=(*NEXT, *span(500, 600)))
    assert (saved["tokens"], saved["given"]) == (12, len(NEXT) + 100)


@pytest.mark.parametrize("namespace", [None, "bob", ("adapter", "alice"), ("a", None)])
def test_salts_and_adapters_stay_apart(namespace: Any) -> None:
    server = Server()
    server.chat(namespace="alice")
    assert server.save(namespace="alice")["status"] == 200
    (text,) = server.records.values()
    assert "alice" not in text
    server = server.restarted()
    refused = server.take("load", namespace, name="tea")
    assert is_refused(refused, 409, "another cache_salt or adapter")
    assert server.cache.lower_tiers.resumable(TURN, namespace) == 0
    assert server.take("load", "alice", name="tea")["tokens"] == 12


def test_what_has_no_name_that_lasts_is_not_saved() -> None:
    server = Server()
    server.chat(namespace=frozenset("a"))
    assert is_refused(server.save(namespace=frozenset("a")), 409, "loaded in place")


def test_no_session_of_updated_weights_is_saved_or_loaded() -> None:
    server = Server()
    server.chat()
    server.save()
    server.tier.renew("1")
    assert is_refused(server.save("two"), 409, "weights were updated")
    assert is_refused(server.take("load", name="tea"), 409, "weights were updated")
    assert server.listed() == {"tea": 12}
    assert server.take("remove", name="tea")["status"] == 200


def test_weights_that_are_updated_meanwhile_end_a_save() -> None:
    server = Server()
    serve(server.cache, "chat", CHAT, TURN[10:])
    order = {"action": "save", "name": "tea", "tokens": list(TURN), "created": 7}
    ticket = server.desk.take(order, None)["ticket"]
    server.tier.renew("1")
    for _ in range(4):
        server.step()
    answer = server.desk.take({"action": "poll", "ticket": ticket}, None)
    assert answer["status"] in (409, 503) and server.listed() == {}
    assert server.tier.pinned_bytes == 0


@pytest.mark.parametrize(
    ("kind", "reason", "status"),
    [
        (Write, Reason.DISK_FULL, 507),
        (Write, Reason.IO, 503),
        (WriteRecord, Reason.DISK_FULL, 507),
        (WriteRecord, Reason.IO, 503),
    ],
)
def test_what_cannot_be_written_is_not_saved(
    kind: type, reason: Reason, status: int
) -> None:
    server = Server()
    serve(server.cache, "chat", CHAT, TURN[10:])
    server.fails[kind] = reason
    assert is_refused(server.save(), status, f"could not be saved: {reason}")
    assert server.listed() == {} and server.tier.pinned_bytes == 0
    assert server.tier.reserved_bytes == 0
    audit(server.cache)


def test_a_failed_save_leaves_the_one_before() -> None:
    server = Server()
    server.chat()
    server.save()
    pinned = server.tier.pinned_bytes
    server.fails[WriteRecord] = Reason.IO
    assert server.save()["status"] == 503
    assert server.listed() == {"tea": 12} and server.tier.pinned_bytes == pinned


@pytest.mark.parametrize("reason", [Reason.CORRUPT, Reason.LAYOUT])
def test_files_that_cannot_be_read_are_told_of(reason: Reason) -> None:
    server = Server()
    server.chat()
    server.save()
    server = server.restarted()
    server.fails[Fetch] = reason
    lost = server.take("load", name="tea")
    assert is_refused(lost, 410, "gone, damaged, or of a kind")
    assert server.listed() == {"tea": 12 if reason == Reason.LAYOUT else 0}


def test_what_is_left_of_a_session_is_loaded() -> None:
    server = Server()
    server.chat()
    serve(server.cache, "next", NEXT, (105, 106))
    server.step()
    turn = (*NEXT, 105, 106)
    assert server.save(tokens=turn)["bundles"] == 2
    server = server.restarted()
    last = server.tier.find(None, array("q", turn), 100)[-1]
    server.tier.fetch_failed(last.key, Reason.CORRUPT)
    assert server.listed() == {"tea": 12}
    loaded = server.take("load", name="tea")
    assert (loaded["tokens"], loaded["saved"]) == (12, len(turn) - 1)


def test_a_host_without_room_is_told_of() -> None:
    server = Server()
    server.chat()
    server.save()
    server = server.restarted()
    host: Any = server.cache.host
    host.obtain = lambda *_, **__: None
    assert is_refused(server.take("load", name="tea"), 507, "host_memory is in use")


def test_a_flush_hides_sessions_until_they_are_loaded_or_saved() -> None:
    server = Server()
    server.chat()
    server.save()
    assert server.cache.flush()
    server.step()
    assert server.bundles and server.listed() == {"tea": 12}
    assert not server.tier.find(None, array("q", TURN), 12)
    assert server.take("load", name="tea")["tokens"] == 12
    assert server.cache.flush()
    server.chat()
    assert server.save("two")["status"] == 200, "it finds what the other one keeps"
    assert server.listed() == {"tea": 12, "two": 12}
    assert len(server.bundles) == 1


def test_a_flush_ends_a_save() -> None:
    server = Server()
    serve(server.cache, "chat", CHAT, TURN[10:])
    order = {"action": "save", "name": "tea", "tokens": list(TURN), "created": 7}
    ticket = server.desk.take(order, None)["ticket"]
    assert server.cache.flush()
    server.step()
    answer = server.desk.take({"action": "poll", "ticket": ticket}, None)
    assert is_refused(answer, 503, "flushed meanwhile")


def test_what_is_removed_is_gone_unless_others_need_it() -> None:
    server = Server()
    server.chat()
    server.save()
    serve(server.cache, "next", NEXT, (105, 106))
    server.step()
    server.save("two", (*NEXT, 105, 106))
    assert server.take("remove", name="tea")["freed_bytes"] < FILE
    assert server.listed() == {"two": len(NEXT) + 1} and len(server.bundles) == 2
    assert server.take("remove", name="two")["freed_bytes"] > 2 * 4096
    server.step()
    assert server.listed() == {} and not server.bundles and not server.records
    assert is_refused(server.take("remove", name="two"), 404, "no session 'two'")
    assert server.tier.used_bytes == server.tier.pinned_bytes == 0


def test_what_cannot_be_removed_stays() -> None:
    server = Server()
    server.chat()
    server.save()
    server.fails[WriteRecord] = Reason.IO
    refused = server.take("remove", name="tea")
    assert is_refused(refused, 503, "could not be removed")
    assert server.listed() == {"tea": 12} and server.records


def test_a_session_that_is_saved_while_it_is_removed_stays() -> None:
    server = Server()
    server.chat()
    server.save()
    save = {"action": "save", "name": "tea", "tokens": list(TURN), "created": 8}
    server.desk.take({"action": "remove", "name": "tea"}, None)
    server.desk.take(save, None)
    for _ in range(3):
        server.step()
    assert server.listed() == {"tea": 12} and len(server.records) == 1
    assert server.restarted().listed() == {"tea": 12}


def test_ranks_that_take_the_same_orders_command_the_same() -> None:
    """Where each has a cache: nothing depends on how a process hashes or numbers."""

    def scenario(server: Server) -> list[Answer]:
        answers = []
        for first in range(0, 300, 30):
            turn = (*span(first, first + 10), 1000 + first, 1001, 1002)
            server.chat(turn)
            server.chat((*span(first + 5000, first + 5010), 1001, 1002))
            name = f"chat {first % 120}"
            answers.append(server.save(name, turn))
            answers.append(server.take("load", name="chat 0"))
            if first % 90 == 60:
                answers.append(server.take("remove", name=name))
                server.cache.flush()
                server.step()  # or serving the next chat drops what was ordered
                answers.append(server.take("list"))
        return answers

    one, other = Server(8 * FILE), Server(8 * FILE)
    assert scenario(one) == scenario(other)
    assert one.ran == other.ran
    kinds = {type(command) for command in one.ran}
    assert {Write, WriteRecord, Discard, Fetch} <= kinds


def test_where_there_are_no_files_it_says_so() -> None:
    assert is_refused(without_disk(), 409, "host_memory and disk")
    assert is_refused(opening(), 503, "try again")


def test_answers_that_nobody_asks_for_do_not_pile_up() -> None:
    server = Server()
    server.chat()
    save = {"action": "save", "name": "tea", "tokens": list(TURN), "created": 8}
    tickets = []
    for _ in range(MOST_ANSWERS + 5):
        tickets.append(server.desk.take(save, None)["ticket"])
        server.step()
    assert len(server.desk._answers) == MOST_ANSWERS
    poll = {"action": "poll", "ticket": tickets[0]}
    assert is_refused(server.desk.take(poll, None), 404, "nothing goes on")


NAMES = [None, 3, "", "x" * 10_000, "a\x00b", ["tea"], {"a": 1}]
TOKENS = [None, [], "tokens", [1.5], [True], [-1], [1 << 63], [[1]], {"a": 1}, [None]]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("action", ["save", "load", "remove"])
def test_what_is_no_name_is_refused(action: str, name: Any) -> None:
    answer = Server().take(action, name=name, tokens=[1], created=7)
    assert answer["status"] == 400 and "name" in answer["error"]


@pytest.mark.parametrize("tokens", TOKENS)
def test_what_are_no_tokens_is_refused(tokens: Any) -> None:
    answer = Server().take("save", name="tea", tokens=tokens, created=7)
    assert answer["status"] == 400 and "tokens" in answer["error"]


ACTIONS = ("save", "load", "remove", "poll", "list")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "action": st.sampled_from(["save", "load", "remove", "poll", "list"])
            | JSON,
            "name": st.just("tea") | JSON,
            "tokens": st.just(list(TURN)) | JSON,
            "created": st.just(7) | JSON,
            "ticket": st.just(1) | JSON,
        },
    )
)
def test_nothing_that_a_client_sends_raises(order: dict[str, Any]) -> None:
    server = Server()
    server.chat()
    server.save()
    answer = server.desk.take(order, None)
    assert "ticket" in answer or answer["status"] in (200, 400, 404, 409)
    for _ in range(4):
        server.step()
    audit(server.cache)
