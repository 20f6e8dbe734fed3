# SPDX-License-Identifier: Apache-2.0
"""Snapshots by the tokens of a chat template, and where an application asks."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.memory.pools import PagePool, SlotPool
from hybrid_plugin.core.policy.message_boundaries import Delimiters
from hybrid_plugin.core.policy.snapshot_positions import SnapshotPolicy
from hybrid_plugin.core.tree.snapshot import SnapshotKind
from tests.core.support import NO_SNAPSHOTS, ByMinimum, Tokens, make_cache, serve, span

START, END, SYSTEM, USER = 1, 2, 3, 4
CHAT = Delimiters((START, SYSTEM), (END,))


class Template:
    """`<start>role content<end>` for every message, as in ChatML."""

    def __init__(self, before: tuple[int, ...] = (), end: tuple[int, ...] = (END,)):
        self.before = before
        self.end = end

    def apply_chat_template(self, conversation: Any, **options: Any) -> list[int]:
        tokens = list(self.before)
        for message in conversation:
            role = SYSTEM if message["role"] == "system" else USER
            content = [100 + ord(letter) for letter in message["content"]]
            tokens += [START, role, *content, *self.end]
        return tokens


class Refuses:
    def apply_chat_template(self, conversation: Any, **options: Any) -> list[int]:
        raise ValueError("System role not supported")


class WithoutSystem(Template):
    def apply_chat_template(self, conversation: Any, **options: Any) -> list[int]:
        return super().apply_chat_template(conversation[1:], **options)


def chat(system: int, *messages: int) -> Tokens:
    """Messages of so many tokens; the system's are the same in all chats."""
    tokens = [START, SYSTEM, *range(1000, 1000 + system), END]
    for index, length in enumerate(messages):
        first = 10_000 * (index + 1) + 100 * length
        tokens += [START, USER, *range(first, first + length), END]
    return tuple(tokens)


class TestTemplates:
    def test_its_tokens_are_read_off(self) -> None:
        assert Delimiters.of_template(Template()) == CHAT

    def test_what_every_prompt_begins_with_belongs_to_the_start(self) -> None:
        found = Delimiters.of_template(Template(before=(7, 8)))
        assert found == Delimiters((7, 8, START, SYSTEM), (END,))

    @pytest.mark.parametrize("template", [Refuses(), WithoutSystem()])
    def test_templates_without_a_system_message(self, template: Any) -> None:
        assert Delimiters.of_template(template) is None

    def test_an_end_needs_a_token(self) -> None:
        with pytest.raises(ValueError, match="marked by at least one token"):
            Delimiters((1,), ())


class TestPositions:
    def test_ends(self) -> None:
        tokens = array("q", [START, SYSTEM, 9, END, START, USER, 8, 7, END])
        assert CHAT.ends(tokens) == [4, 9]
        assert CHAT.system_end(tokens, [4, 9]) == 4

    def test_ends_of_several_tokens(self) -> None:
        both = Delimiters((START,), (END, 5))
        tokens = array("q", [START, END, 9, END, 5, END])
        assert both.ends(tokens) == [5]

    def test_a_sequence_that_begins_otherwise_has_no_system_message(self) -> None:
        tokens = array("q", [START, USER, 9, END])
        assert CHAT.system_end(tokens, CHAT.ends(tokens)) == 0
        assert CHAT.system_end(array("q", [START, SYSTEM, 9]), []) == 0


def make(delimiters: Delimiters | None) -> HybridCache:
    policy = SnapshotPolicy(4, NO_SNAPSHOTS, delimiters=delimiters, system_min_tokens=8)
    return HybridCache(PagePool(200), SlotPool(20), 4, policy, eviction=ByMinimum())


class TestHits:
    def test_the_second_request_with_a_system_prompt_hits(self) -> None:
        """The system message ends at 33: a snapshot lies at its last page end."""
        first, second = chat(30, 5), chat(30, 9)
        assert [
            [
                serve(make_with, name, tokens).hit
                for name, tokens in (("a", first), ("b", second))
            ]
            for make_with in (make(CHAT), make(None))
        ] == [[0, 32], [0, 0]]

    def test_a_short_system_message_is_not_worth_it(self) -> None:
        cache = make(CHAT)
        serve(cache, "a", chat(3, 5))
        assert serve(cache, "b", chat(3, 9)).hit == 0

    def test_the_prompt_end_is_that_of_the_last_message(self) -> None:
        policy = SnapshotPolicy(4, NO_SNAPSHOTS, delimiters=CHAT)
        prompt = array("q", [*chat(30, 20), START, 6, 6, 6, 6])
        stops = policy.snapshot_positions_of(
            prompt,
            hit=0,
            kv_length=0,
            repays=lambda kind, saved: kind is SnapshotKind.PROMPT_END,
        )
        assert stops == {32 + 24: SnapshotKind.PROMPT_END}


class TestHints:
    def test_the_application_names_positions(self) -> None:
        cache = make_cache(pages=60)
        found = cache.look_up(span(0, 50), snapshot_at=(13, 30, 99, 0))
        assert found.snapshot_positions == (12, 28)

    def test_the_second_request_hits_there(self) -> None:
        cache = make_cache(pages=60)
        tokens = span(0, 50)
        found = cache.look_up(tokens, snapshot_at=(20,))
        assert cache.admit("a", found, num_tokens=50) is not None
        for end in (20, 50):
            cache.drain_commands()
            cache.advance("a", end)
        cache.finish("a", tokens, 50)
        assert serve(cache, "b", (*span(0, 23), *span(100, 110))).hit == 20
