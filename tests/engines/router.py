# SPDX-License-Identifier: Apache-2.0
"""A subscriber of an engine's KV cache events that predicts hits, as routers do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

QUIET_MS = 400
"""In which a publisher's thread sends what the scheduler has given to it."""


class Router:
    """Knows what a server has cached by its events alone."""

    def __init__(self, endpoint: str, batch: type[Any]) -> None:
        """Subscribe, before or after there is a publisher.

        Args:
            endpoint: of ZMQ.
            batch: the engine's own type of a message.
        """
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.connect(endpoint)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._decoder = msgspec.msgpack.Decoder(batch)
        self._next = 0
        self.kinds: dict[int | None, str | None] = {}
        """Kind of each group of layers, where the engine tells."""
        self._held: dict[int | None, set[Any]] = {}
        """Names of the blocks of each group."""
        self._after: dict[tuple[Any, tuple[int, ...]], Any] = {}
        """Name of a block by the one before it and its tokens."""
        self.cleared = 0

    def close(self) -> None:
        """End the subscription."""
        self._socket.close(linger=0)

    def listen(self) -> int:
        """Take all events until it is quiet; returns their number."""
        heard = 0
        while self._socket.poll(QUIET_MS):
            _, number, payload = self._socket.recv_multipart()
            assert int.from_bytes(number, "big") == self._next, "a message is missing"
            self._next += 1
            batch = self._decoder.decode(payload)
            for event in batch.events:
                heard += 1
                getattr(self, f"_{type(event).__name__}")(event)
        return heard

    def deepest(self, prompt: Sequence[int], page_size: int) -> int:
        """Tokens of a prompt that the server should be able to restore, in whole pages.

        Where groups of layers are told apart, a state must be there as well.
        """
        pages = self._held.get(self._group("full_attention"), set())
        states = self._held.get(self._group("mamba"), pages)
        name, found = None, 0
        for start in range(0, len(prompt) - page_size, page_size):
            name = self._after.get((name, tuple(prompt[start : start + page_size])))
            if name not in pages:
                break
            if name in states:
                found = start + page_size
        return found

    @property
    def knows_states(self) -> bool:
        """Whether the engine tells states from KV."""
        return "mamba" in self.kinds.values()

    @property
    def announced_pages(self) -> int:
        """Pages of full attention that are known."""
        return len(self._held.get(self._group("full_attention"), ()))

    def _group(self, kind: str) -> int | None:
        by_kind = {kind: group for group, kind in self.kinds.items()}
        return by_kind.get(kind)

    def _BlockStored(self, event: Any) -> None:  # noqa: N802
        group = getattr(event, "group_idx", None)
        self.kinds[group] = getattr(event, "kv_cache_spec_kind", None)
        size, parent = event.block_size, event.parent_block_hash
        assert len(event.token_ids) == size * len(event.block_hashes)
        held = self._held.setdefault(group, set())
        for index, name in enumerate(event.block_hashes):
            assert name not in held, "stored twice"
            tokens = tuple(event.token_ids[index * size : (index + 1) * size])
            assert self._after.setdefault((parent, tokens), name) == name
            held.add(name)
            parent = name

    def _BlockRemoved(self, event: Any) -> None:  # noqa: N802
        self._held[getattr(event, "group_idx", None)] -= set(event.block_hashes)

    def _AllBlocksCleared(self, event: Any) -> None:  # noqa: N802
        self.cleared += 1
        self._held.clear()
