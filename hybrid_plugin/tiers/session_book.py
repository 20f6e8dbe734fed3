# SPDX-License-Identifier: Apache-2.0
"""Which sessions are saved in a folder, and what they keep there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from hybrid_plugin.core.tree.tokens import Tokens
from hybrid_plugin.errors import ConfigError
from hybrid_plugin.sizes import gib
from hybrid_plugin.tiers.disk import DiskTier
from hybrid_plugin.tiers.saved_session import SavedSession, key_of


class SessionBook:
    """The sessions of a folder, of all models, whose bundles it pins."""

    def __init__(
        self, tier: DiskTier, sessions: Iterable[SavedSession], ranks: int
    ) -> None:
        """Pin what sessions keep.

        Args:
            tier: that has their bundles; as it is before anything goes.
            sessions: of `TierFolder`.
            ranks: that have a file of each.

        Raises:
            ConfigError: if they keep more than the tier may have.
        """
        self._tier = tier
        self._ranks = ranks
        self._home = tier.fingerprint
        self._sessions = {session.key: session for session in sessions}
        for session in self:
            tier.pin(session.keys)
            tier.reserved_bytes += self._size(session)
        tier.sessions = len(self)
        if tier.pinned_bytes > tier.budget:
            raise ConfigError(
                f"saved sessions keep {gib(tier.pinned_bytes)}, more than disk.size "
                f"allows, {gib(tier.budget)}: raise it, or remove sessions with "
                "hybrid-plugin session rm."
            )

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[SavedSession]:
        """All of them, the oldest first."""
        sessions = self._sessions.values()
        return iter(sorted(sessions, key=lambda one: (one.created, one.key)))

    def is_own(self, session: SavedSession) -> bool:
        """Whether a session is one of the model whose weights were loaded."""
        return session.fingerprint == self._home

    def get(self, name: str) -> SavedSession | None:
        """The model's session of a name.

        Args:
            name: that `check_name` let pass.
        """
        return self._sessions.get(key_of(self._home, name))

    def reveal(self, namespace: str, tokens: Tokens) -> None:
        """Have sessions found again, behind a flush, that a sequence continues."""
        for session in self._sessions.values():
            length = len(session.tokens)
            if (
                session.namespace == namespace
                and self.is_own(session)
                and tokens[:length] == session.tokens
            ):
                self._tier.reveal(session.keys)

    def on_disk(self, session: SavedSession) -> int:
        """Tokens of a session whose bundles are all there."""
        end = 0
        for key in session.keys:
            entry = self._tier.get(key)
            if entry is None or entry.start > end:
                break
            end = entry.end
        return end

    # ------------------------------------------------------------------ change

    def begin(self, session: SavedSession) -> Sequence[str] | None:
        """Pin what a session keeps, before it is written.

        Returns:
            Keys to discard; None if there is no room for its file, with nothing
            changed.
        """
        self._tier.pin(session.keys)  # so that they do not make room themselves
        discard = self._tier.reserve(self._size(session))
        if discard is None:
            self._tier.unpin(session.keys)
        return discard

    def withdraw(self, session: SavedSession) -> None:
        """Undo `begin`: it could not be written."""
        self._tier.unpin(session.keys)
        self._tier.reserve(-self._size(session))

    def enter(self, session: SavedSession) -> None:
        """Have a session that was begun, in the place of any other of its name."""
        old = self._sessions.get(session.key)
        self._sessions[session.key] = session
        self._tier.sessions = len(self)
        if old is not None:
            self.withdraw(old)

    def remove(self, key: str) -> Sequence[str]:
        """Forget the session of a key, and what nothing else needs of it.

        Returns:
            Keys to discard.
        """
        session = self._sessions.pop(key, None)
        if session is None:
            return ()
        self._tier.sessions = len(self)
        self.withdraw(session)
        return self._tier.drop(session.keys)

    def _size(self, session: SavedSession) -> int:
        """Bytes of its files on all ranks."""
        return self._ranks * len(session.as_text())
