# SPDX-License-Identifier: Apache-2.0
"""Threads that read from peers, and the agents that they have."""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest

from hybrid_plugin.errors import ConfigError
from hybrid_plugin.tiers.failure import Failure, Reason
from hybrid_plugin.tiers.peers.agents import ReadingAgents, agents_that_fit


class Agent:
    """Notes what is asked of it."""

    region = (4096, 100)

    def __init__(self, number: int) -> None:
        self.number = number
        self.metadata = b"agent %d" % number
        self.did: list[str] = []

    def scratch(self, rows: Any) -> AbstractContextManager[None]:
        self.did.append("scratch")
        return nullcontext()

    def read(self, *what: Any) -> Failure | None:
        self.did.append("read")
        return Failure(Reason.PEER_GONE, str(self.number))

    def stop(self) -> None:
        self.did.append("stop")

    def close(self) -> None:
        self.did.append("close")


class Maker:
    """Makes so many of them."""

    def __init__(self, most: int = 99) -> None:
        self.most = most
        self.made: list[Agent] = []

    def __call__(self) -> Agent:
        if len(self.made) == self.most:
            raise ConfigError("there is no more memory.")
        self.made.append(Agent(len(self.made)))
        return self.made[-1]


def read(agents: ReadingAgents) -> str:
    """The number of the agent that reads."""
    with agents.scratch([]):
        failure = agents.read(b"", [], [], lambda: None)
    assert failure is not None
    return failure.detail


def read_in_a_thread(agents: ReadingAgents, times: int = 1) -> set[str]:
    found: set[str] = set()

    def work() -> None:
        found.update([read(agents) for _ in range(times)])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return found


def test_each_thread_has_an_agent_of_its_own_until_there_are_enough() -> None:
    make = Maker()
    agents = ReadingAgents(make, 3)
    assert (agents.metadata, agents.region) == (b"agent 0", (4096, 100))
    assert len(make.made) == 1, "who reads nothing needs no more"
    assert [read_in_a_thread(agents, 2) for _ in range(5)] == [
        {"0"},
        {"1"},
        {"2"},
        {"0"},
        {"1"},
    ]
    assert agents.metadata == b"agent 0", "peers know the first one"


def test_all_of_them_stop_and_are_closed() -> None:
    make = Maker()
    agents = ReadingAgents(make, 3)
    read(agents)
    read_in_a_thread(agents)
    agents.stop()
    assert read_in_a_thread(agents) == {"0"}, "none is made any more"
    agents.close()
    assert [one.did[-1] for one in make.made] == ["close", "close"]
    assert all("stop" in one.did for one in make.made)


def test_where_another_one_cannot_be_made_they_share(
    caplog: pytest.LogCaptureFixture,
) -> None:
    agents = ReadingAgents(Maker(2), 4)
    found = [read_in_a_thread(agents) for _ in range(4)]
    assert found == [{"0"}, {"1"}, {"0"}, {"1"}]
    (record,) = caplog.records
    assert "with 2 agents" in record.message and "no more memory" in record.message


def test_the_first_one_must_be_made() -> None:
    with pytest.raises(ConfigError):
        ReadingAgents(Maker(0), 4)


@pytest.mark.parametrize(("cores", "agents"), [(1, 1), (2, 1), (8, 2), (32, 4)])
def test_small_machines_have_one(
    cores: int, agents: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    assert agents_that_fit(4) == agents
