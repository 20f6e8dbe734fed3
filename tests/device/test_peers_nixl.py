# SPDX-License-Identifier: Apache-2.0
"""Two processes read each other's host rows over real NIXL, on this machine alone."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_plugin.core.commands import Fetch, Pool
from hybrid_plugin.engine import rank_peers
from hybrid_plugin.tiers.failure import Failure, Reason
from hybrid_plugin.tiers.identity import Identity
from tests.device.peer_rank import (
    IDENTITY,
    KV_BYTES,
    STATE,
    PeerRank,
    rows_of,
    tokens_of,
)

NIXL = ("nixl", "nixl_cu12", "nixl_cu13")
if not any(importlib.util.find_spec(name) for name in NIXL):
    pytest.skip("NIXL is not installed", allow_module_level=True)

PAGES = 40
MANY = 4096
"""Pages of 64 MiB: more than TCP moves before somebody looks at the transfer."""
OVER_TCP = {"UCX_TLS": "tcp,self"}


class Peer:
    """A rank in a process of its own."""

    def __init__(
        self, pages: int, lease_seconds: float, environment: Mapping[str, str]
    ) -> None:
        command = [sys.executable, "-m", "tests.device.peer_rank"]
        self.process = subprocess.Popen(
            [*command, str(pages), str(lease_seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "NIXL_LOG_LEVEL": "WARN", **environment},
            cwd=Path(__file__).parents[2],
        )
        self.port = self._heard()["port"]

    def offer(self, first: int, count: int) -> str:
        self._say(f"offer {first} {count}")
        return str(self._heard()["key"])

    def outcome(self) -> dict[str, Any]:
        self._say("settle")
        return self._heard()

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        self.process.communicate(timeout=120)

    def _say(self, line: str) -> None:
        assert self.process.stdin is not None
        print(line, file=self.process.stdin, flush=True)

    def _heard(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):  # others are NIXL's
                return dict(json.loads(line))
        raise AssertionError("the peer has ended")


@contextmanager
def rank(pages: int = PAGES, seed: int = 2, **more: Any) -> Iterator[PeerRank]:
    made = PeerRank(pages, seed, **more)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def peer(pages: int, **environment: str) -> Iterator[Peer]:
    made = Peer(pages, 30.0, environment)
    try:
        yield made
    finally:
        made.close()


def check_reads(far: Peer, own: PeerRank, theirs: PeerRank) -> None:
    """Read some offers, and compare rows with those of a rank with the same content."""
    before = own.row(Pool.KV, 9)
    for first, count in ((3, 9), (20, 5), (0, 1)):
        key = far.offer(first, count)
        outcome = own.fetch(key, count)
        assert outcome.lost is None
        assert outcome.bytes == count * KV_BYTES + STATE
        wanted = theirs.pools[Pool.KV][first : first + count]
        found = b"".join(own.row(Pool.KV, row) for row in range(count))
        assert found == wanted.numpy().tobytes()
        state = theirs.pools[Pool.STATE][first]
        assert own.row(Pool.STATE, 2) == state.numpy().tobytes()
        told = far.outcome()
        assert (told["lost"], told["bytes"]) == (None, outcome.bytes)
    assert own.row(Pool.KV, 9) == before, "what was not asked for is as it was"


def test_rows_of_one_process_are_read_by_another_one() -> None:
    with peer(PAGES) as far, rank() as own:
        theirs = PeerRank(PAGES, 1)
        check_reads(far, own, theirs)
        theirs.close()


def test_reads_go_on_beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_peers, "agents_that_fit", lambda most: 2)
    with peer(PAGES) as far, rank() as own:
        theirs = PeerRank(PAGES, 1)
        wanted = theirs.pools[Pool.KV][3:9].numpy().tobytes()
        theirs.close()
        commands = []
        for ticket, first in enumerate((0, 10)):
            rows = tuple(range(first, first + 6))
            bundle = rows_of(far.offer(3, 6), tokens_of(6), rows, 2 + ticket)
            commands.append(Fetch(ticket, "peer", (bundle,)))
        own.executor.run(commands)
        assert [one.lost for one in own.outcomes(2)] == [None, None]
        for first in (0, 10):
            found = [own.row(Pool.KV, row) for row in range(first, first + 6)]
            assert b"".join(found) == wanted


def test_both_read_from_each_other_in_one_process() -> None:
    """Ranks that are servers of prompts and of answers alike."""
    with rank() as one, rank() as other:
        for giver, taker in ((one, other), (other, one)):
            key = giver.offer(4, 6)
            assert taker.fetch(key, 6).lost is None
            wanted = giver.pools[Pool.KV][4:10].numpy().tobytes()
            found = b"".join(taker.row(Pool.KV, row) for row in range(6))
            assert found == wanted
            assert giver.outcomes(1)[0].lost is None


def test_a_peer_that_dies_in_mid_transfer_is_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in OVER_TCP.items():
        monkeypatch.setenv(name, value)
    with peer(MANY, **OVER_TCP) as far, rank(MANY) as own:
        theirs = PeerRank(MANY, 1)
        check_reads(far, own, theirs)
        key = far.offer(0, MANY)
        plane = own.peers._plane
        real, killed = plane.read, []

        def read(metadata: Any, there: Any, here: Any, meanwhile: Any) -> Any:
            def die() -> None:
                if not killed:
                    killed.append(far.kill())

            return real(metadata, there, here, die)

        plane.read = read  # type: ignore[method-assign]
        lost = own.fetch(key, MANY).lost
        assert killed, "the transfer was over before anybody looked"
        assert lost is not None and lost.failure.reason is Reason.PEER_GONE
        # It is gone for the next one, too, and other peers are read from.
        lost = own.fetch(key, MANY).lost
        assert lost is not None and lost.failure.reason is Reason.PEER_GONE
        assert own.fetch(theirs.offer(1, 3), 3).lost is None
        theirs.close()


def test_an_offer_whose_lease_is_over_is_not_read() -> None:
    with rank(lease_seconds=0.0) as one, rank() as other:
        key = one.offer(3, 4)
        lost = one.outcomes(1)[0].lost
        assert lost is not None and lost.failure.reason is Reason.UNREAD
        lost = other.fetch(key, 4).lost
        assert lost is not None and lost.failure.reason is Reason.LEASE_OVER


def test_another_model_is_not_read_from() -> None:
    with rank() as one, rank(identity=replace(IDENTITY, weights="those")) as other:
        lost = other.fetch(one.offer(3, 4), 4).lost
        assert lost is not None and lost.failure.reason is Reason.PEER_MODEL


def test_a_rank_reads_from_the_rank_of_its_place() -> None:
    def place(number: int) -> Identity:
        return replace(IDENTITY, tensor_rank=number, tensor_ranks=2)

    with (
        rank(identity=place(0)) as first,
        rank(identity=place(1), seed=3) as second,
        rank(identity=place(1)) as own,
    ):
        second.listening(first, second)
        key = second.offer(4, 6)
        assert own.fetch(key, 6).lost is None
        wanted = second.pools[Pool.KV][4:10].numpy().tobytes()
        assert b"".join(own.row(Pool.KV, row) for row in range(6)) == wanted
        second.listening(second, first)
        lost = own.fetch(second.offer(4, 6), 6).lost
        assert lost is not None and lost.failure.reason is Reason.PEER_RANKS


def test_memory_that_is_not_registered_is_not_read() -> None:
    with rank() as one, rank() as other:
        plane = other.peers._plane
        outside = torch.zeros(4096, dtype=torch.uint8)
        address, _ = other.host.region
        failure = plane.read(
            one.peers._plane.metadata,
            [(outside.data_ptr(), 4096)],
            [(address, 4096)],
            lambda: None,
        )
        assert isinstance(failure, Failure)
        assert failure.reason is Reason.PEER_MALFORMED
        failure = plane.read(b"no metadata", [(address, 1)], [(address, 1)], int)
        assert failure is not None


def test_it_listens_on_this_machine_only() -> None:
    """Its own port, and UCX's."""
    with rank() as own:
        listening = _listening(os.getpid())
        assert own.peers.port in {port for _, port in listening}
        assert {address for address, _ in listening} == {"127.0.0.1"}


def _listening(pid: int) -> set[tuple[str, int]]:
    """Addresses and ports where a process listens, as Linux says it."""
    sockets = set()
    for entry in os.scandir(f"/proc/{pid}/fd"):
        try:
            sockets.add(os.readlink(entry.path))
        except OSError:
            continue
    found = set()
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
            address, port = fields[1].split(":")
            numbers = reversed(bytes.fromhex(address))
            found.add((".".join(map(str, numbers)), int(port, 16)))
    assert Path(f"/proc/{pid}/net/tcp").exists()
    return found


def test_a_process_that_made_an_agent_ends_well() -> None:
    """With the system's RDMA drivers, NIXL by itself dies when it exits (1.5.1)."""
    made = (
        "import torch\n"
        "from hybrid_plugin.tiers.peers.agent import NixlAgent\n"
        "memory = torch.zeros(1 << 16, dtype=torch.int8)\n"
        "agent = NixlAgent((memory.data_ptr(), memory.numel()), loopback=True)\n"
        "agent.close()\n"
    )
    assert subprocess.run([sys.executable, "-c", made], check=False).returncode == 0
