# SPDX-License-Identifier: Apache-2.0
"""Saved sessions where the cache is: takes orders, and says what became of them.

An order and an answer are JSON objects, which any engine carries between its processes.
An order that takes time gets a ticket, under which one asks again: `{"action": "poll",
"ticket": 3}`.  Where each rank has a cache, all take the same orders between the same
steps.  Nothing that a client sends raises here.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.tiers.fetches import Fetching
from hybrid_plugin.core.tiers.outer import Recording
from hybrid_plugin.core.tiers.saves import HOST_FULL, Saving
from hybrid_plugin.core.tiers.writes import NO_ROOM
from hybrid_plugin.core.tree.tokens import Tokens
from hybrid_plugin.sizes import gib
from hybrid_plugin.tiers.disk import DiskTier
from hybrid_plugin.tiers.failure import Reason
from hybrid_plugin.tiers.keys import namespace_digest
from hybrid_plugin.tiers.saved_session import SavedSession, check_name
from hybrid_plugin.tiers.session_book import SessionBook

Answer: TypeAlias = dict[str, Any]
"""With a `status` of HTTP, or the `ticket` of what is not over."""

MOST_ANSWERS: Final = 256
"""That are kept for who asks again; the oldest go, whose clients are gone."""

NO_DISK: Final = (
    "sessions are kept in files, and this server has none: start it with the options "
    "host_memory and disk"
)
_OPENING = "the server is opening its files: try again"
_NOTHING = (
    "nothing of this is cached: save a session after an answer, with the same messages "
    "or tokens, cache_salt and adapter"
)
_RENEWED = (
    "the weights were updated since the server was started: no session can be saved or "
    "loaded that a restart would find"
)
_UNNAMED = (
    "the adapter was loaded in place, and has no name that lasts: its sessions cannot "
    "be kept"
)
_NOT_THERE = "there is no session {name!r} of this model"
_OTHER_NAMESPACE = (
    "session {name!r} was saved with another cache_salt or adapter: give those it was "
    "saved with"
)
_NO_ROOM = (
    "the session does not fit: the disk may have {budget}, and sessions keep {pinned} "
    "of it; remove some, or raise disk.size"
)
_HOST_FULL = "all of host_memory is in use at this moment: try again, or raise it"
_UNSAVED = "the session could not be saved: {reason}"
_LOST = (
    "the files of session {name!r} are gone, damaged, or of a kind that this server "
    "cannot read"
)
_UNREMOVED = "the session could not be removed: {reason}"


@dataclass(frozen=True, slots=True)
class Serving:
    """What a session says of the server that saved it, for people."""

    model: str
    engine: str


class _Task(Protocol):
    """Something that takes time."""

    def step(self) -> Answer | None:
        """Go on; the answer when it is over."""


class SessionDesk:
    """Takes orders about the sessions of one cache."""

    def __init__(
        self, cache: HybridCache, tier: DiskTier, book: SessionBook, serving: Serving
    ) -> None:
        """Nothing was ordered.

        Args:
            cache: with the tier behind it.
            tier: where sessions are kept.
            book: of what is kept there.
            serving: for new sessions.
        """
        self.cache = cache
        self.tier = tier
        self.book = book
        self.serving = serving
        self._last_ticket = 0
        self._tasks: dict[int, _Task] = {}
        self._answers: dict[int, Answer] = {}

    @property
    def is_busy(self) -> bool:
        """Whether steps are of use: something was ordered that is not over."""
        return bool(self._tasks)

    def take(self, order: Mapping[str, Any], namespace: Hashable) -> Answer:
        """Take an order.

        Args:
            order: `action` is "save", "load", "remove", "list" or "poll".  The first
                three need a `name`; "save" needs `tokens`, and the time as `created` in
                seconds since 1970; "poll" needs a `ticket`.
            namespace: of the adapter and the salt that it names.
        """
        try:
            match order.get("action"):
                case "save":
                    return self._begin(self._save(order, namespace))
                case "load":
                    return self._begin(self._load(order, namespace))
                case "remove":
                    return self._begin(self._remove(order))
                case "list":
                    return self._list()
                case "poll":
                    return self._poll(order)
            raise ValueError("action is none of save, load, remove, list and poll")
        except _RefusedError as refusal:
            return refusal.answer
        except (ValueError, TypeError, OverflowError, KeyError) as error:
            return failure(400, f"{error}")

    def step(self) -> None:
        """Go on with what was ordered; call it between the steps of the cache."""
        for ticket, task in list(self._tasks.items()):
            answer = task.step()
            if answer is not None:
                del self._tasks[ticket]
                self._answers[ticket] = answer
        while len(self._answers) > MOST_ANSWERS:
            del self._answers[next(iter(self._answers))]

    # ------------------------------------------------------------------ orders

    def _begin(self, task: _Task) -> Answer:
        answer = task.step()
        if answer is not None:
            return answer
        self._last_ticket += 1
        self._tasks[self._last_ticket] = task
        return {"ticket": self._last_ticket}

    def _poll(self, order: Mapping[str, Any]) -> Answer:
        ticket = order["ticket"]
        if ticket in self._tasks:
            return {"ticket": ticket}
        return self._answers.pop(ticket, None) or failure(
            404, f"nothing goes on under ticket {ticket!r:.40}"
        )

    def _list(self) -> Answer:
        tier = self.tier
        return {
            "status": 200,
            "sessions": [self._describe(session) for session in self.book],
            "pinned_bytes": tier.pinned_bytes,
            "disk_bytes": tier.used_bytes,
            "disk_size": tier.budget,
        }

    def _describe(self, session: SavedSession) -> Answer:
        return describe(session) | {
            "on_disk": self.book.on_disk(session),
            "is_own_model": self.book.is_own(session),
        }

    def _save(self, order: Mapping[str, Any], namespace: Hashable) -> _Task:
        name, tokens, created = _name(order), _tokens(order), int(order["created"])
        digest = self._digest(namespace)
        self.book.reveal(digest, tokens)
        saving = self.cache.lower_tiers.save(tokens, namespace)
        if saving is None:
            raise _RefusedError(404, _NOTHING)
        return _Save(self, name, digest, created, saving, len(tokens))

    def _load(self, order: Mapping[str, Any], namespace: Hashable) -> _Task:
        session = self._named(order)
        if session.namespace != self._digest(namespace):
            raise _RefusedError(409, _OTHER_NAMESPACE.format(name=session.name))
        self.tier.reveal(session.keys)
        return _Load(self, session, namespace)

    def _remove(self, order: Mapping[str, Any]) -> _Task:
        return _Remove(self, self._named(order))

    def _named(self, order: Mapping[str, Any]) -> SavedSession:
        name = _name(order)
        session = self.book.get(name)
        if session is None:
            raise _RefusedError(404, _NOT_THERE.format(name=name))
        return session

    def _digest(self, namespace: Hashable) -> str:
        if self.tier.is_renewed:
            raise _RefusedError(409, _RENEWED)
        try:
            return namespace_digest(namespace).hex()
        except TypeError:
            raise _RefusedError(409, _UNNAMED) from None

    def no_room(self) -> Answer:
        """That the disk does not take more."""
        budget, pinned = gib(self.tier.budget), gib(self.tier.pinned_bytes)
        return failure(507, _NO_ROOM.format(budget=budget, pinned=pinned))


@dataclass(slots=True)
class _Save:
    """Waits for the bundles, pins them, and waits for the session's own file."""

    desk: SessionDesk
    name: str
    namespace: str
    created: int
    saving: Saving
    given: int
    session: SavedSession | None = None
    recording: Recording | None = None

    def step(self) -> Answer | None:
        if self.session is None or self.recording is None:
            return self._record() if self.saving.is_over else None
        if not self.recording.is_over:
            return None
        book = self.desk.book
        if self.recording.reason:
            book.withdraw(self.session)
            return self._failed(self.recording.reason)
        book.enter(self.session)
        return {"status": 200, **describe(self.session), "given": self.given}

    def _record(self) -> Answer | None:
        desk, saving = self.desk, self.saving
        if saving.reason:
            return self._failed(saving.reason)
        if desk.tier.is_renewed:
            return failure(409, _RENEWED)
        entries = desk.tier.path(saving.namespace, saving.tokens)
        if not entries:
            return self._failed(Reason.MISSING)
        self.session = SavedSession(
            name=self.name,
            fingerprint=desk.tier.fingerprint,
            namespace=self.namespace,
            tokens=saving.tokens,
            keys=tuple(entry.name.key for entry in entries),
            size=sum(entry.file_bytes for entry in entries),
            created=self.created,
            model=desk.serving.model,
            engine=desk.serving.engine,
        )
        discard = desk.book.begin(self.session)
        if discard is None:
            return desk.no_room()
        text = self.session.as_text()
        self.recording = desk.cache.lower_tiers.record(self.session.key, text, discard)
        return None

    def _failed(self, reason: str) -> Answer:
        if reason == NO_ROOM:
            return self.desk.no_room()
        if reason == HOST_FULL:
            return failure(507, _HOST_FULL)
        status = 507 if reason == Reason.DISK_FULL else 503
        return failure(status, _UNSAVED.format(reason=reason))


@dataclass(slots=True)
class _Load:
    """Waits until the host has what the disk has: what cannot be read is left out."""

    desk: SessionDesk
    session: SavedSession
    namespace: Hashable
    fetch: Fetching | None = None

    def step(self) -> Answer | None:
        if self.fetch is not None and not self.fetch.is_over:
            return None
        cache, tokens = self.desk.cache, self.session.tokens
        if self.fetch is None or self.fetch.reason:  # then the disk has less now
            self.fetch = cache.lower_tiers.bring(tokens, self.namespace)
            if self.fetch is not None:
                return None
        return self._answer(cache.lower_tiers.resumable(tokens, self.namespace))

    def _answer(self, ready: int) -> Answer:
        name, tokens = self.session.name, self.session.tokens
        found = self.desk.tier.find(self.namespace, tokens, len(tokens))
        stored = found[-1].end if found else 0
        if stored > ready:
            return failure(507, _HOST_FULL)
        if not ready:
            return failure(410, _LOST.format(name=name))
        return {"status": 200, "name": name, "tokens": ready, "saved": len(tokens)}


@dataclass(slots=True)
class _Remove:
    """Waits until the session's own file is gone."""

    desk: SessionDesk
    session: SavedSession
    recording: Recording | None = None

    def step(self) -> Answer | None:
        desk = self.desk
        if self.recording is None:
            self.recording = desk.cache.lower_tiers.record(self.session.key, None)
        if not self.recording.is_over:
            return None
        if self.recording.reason:
            return failure(503, _UNREMOVED.format(reason=self.recording.reason))
        before = desk.tier.used_bytes
        desk.cache.lower_tiers.discard(desk.book.remove(self.session.key))
        freed = before - desk.tier.used_bytes
        return {"status": 200, "name": self.session.name, "freed_bytes": freed}


class _RefusedError(Exception):
    """An order that cannot be taken."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.answer = failure(status, sentence)


def failure(status: int, sentence: str) -> Answer:
    """An answer that says what is wrong."""
    return {"status": status, "error": sentence}


def opening() -> Answer:
    """The answer of a server whose files are not open yet."""
    return failure(503, _OPENING)


def without_disk() -> Answer:
    """The answer of a server without files."""
    return failure(409, NO_DISK)


def describe(session: SavedSession) -> Answer:
    """What anybody may know of a session: not its tokens."""
    return {
        "name": session.name,
        "tokens": len(session.tokens),
        "bundles": len(session.keys),
        "bytes": session.size,
        "created": session.created,
        "model": session.model,
        "engine": session.engine,
    }


def _name(order: Mapping[str, Any]) -> str:
    name = order.get("name")
    if not isinstance(name, str):
        raise ValueError("a session has a name")
    check_name(name)
    return name


def _tokens(order: Mapping[str, Any]) -> Tokens:
    tokens = order.get("tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ValueError("a session has tokens")
    if not all(type(token) is int and 0 <= token < 1 << 63 for token in tokens):
        raise ValueError("tokens are whole numbers, none negative")
    return array("q", tokens)
