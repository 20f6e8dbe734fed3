# SPDX-License-Identifier: Apache-2.0
"""Sessions in a folder of a server, without the server."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hybrid_plugin.engine.session_desk import describe
from hybrid_plugin.errors import ConfigError
from hybrid_plugin.tiers.saved_session import SavedSession
from hybrid_plugin.tools.bundle import listing
from hybrid_plugin.tools.bundle.listing import Listed


def read(folder: Path) -> list[dict[str, Any]] | None:
    """What there is, the oldest first; None if there is no folder."""
    bundles = listing.read(folder)
    if bundles is None:
        return None
    by_place = {(one.path.parent.name, one.key): one for one in bundles}
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for path, session in listing.sessions(folder):
        there = _on_disk(session, path.parent.name, by_place)
        count = path.parent.name.rpartition("-of-")[2]
        entry = found.setdefault(
            (count, session.key),
            {**describe(session), "fingerprint": session.fingerprint, "on_disk": there},
        )
        entry["on_disk"] = min(entry["on_disk"], there)
    return sorted(found.values(), key=lambda one: (one["created"], one["name"]))


def remove(folder: Path, name: str, model: str | None) -> int:
    """Remove a session, and the bundles that nothing else needs.

    Args:
        folder: of a server that does not run.
        name: of the session.
        model: of its model's fingerprint, or the text that its server gave it; None if
            only one has such a session.

    Returns:
        Bytes of the files that are gone.

    Raises:
        ConfigError: if there is no such session, if several models have one, or if a
            server has the folder open.
        OSError: if the file system fails.
    """
    with listing.held(folder):
        named = [
            (path, one) for path, one in listing.sessions(folder) if one.name == name
        ]
        chosen = [
            (path, one)
            for path, one in named
            if model is None or model == one.model or one.fingerprint.startswith(model)
        ]
        if not chosen:
            raise ConfigError(f"There is no session {name!r} in {folder}.")
        if len({one.fingerprint for _, one in chosen}) > 1:
            raise ConfigError(
                f"Several models have a session {name!r} in {folder}: name one with "
                "--model."
            )
        freed = 0
        for path, session in chosen:
            freed += path.stat().st_size
            path.unlink()
            freed += _remove_bundles(path.parent, session)
        return freed


def _remove_bundles(place: Path, session: SavedSession) -> int:
    """Remove what nothing else in a rank's folder needs; returns bytes."""
    kept = {key for _, other in listing.sessions(place) for key in other.keys}
    bundles = {one.key: one for one in listing.read(place) or ()}
    freed = 0
    for key in reversed(session.keys):
        one = bundles.get(key)
        if one is None:
            continue
        if key in kept or key in _parents(bundles.values()):
            break
        del bundles[key]
        freed += one.size
        one.path.unlink()
    return freed


def _parents(bundles: Iterable[Listed]) -> set[str]:
    return {one.manifest.parent for one in bundles if one.manifest is not None}


def _on_disk(
    session: SavedSession, place: str, bundles: dict[tuple[str, str], Listed]
) -> int:
    """Tokens of a session whose bundles a rank has."""
    end = 0
    for key in session.keys:
        one = bundles.get((place, key))
        if one is None or one.manifest is None or one.manifest.start > end:
            break
        end = one.manifest.end
    return end
