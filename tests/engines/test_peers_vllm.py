# SPDX-License-Identifier: Apache-2.0
"""One vLLM computes prompts, another one answers: real servers, real NIXL, a router.

Answers must be those that the second server alone gives, whatever happens to the first.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from hybrid_plugin.tiers.failure import Reason
from hybrid_plugin.tiers.peers.params import OWN
from tests.engines import peer_servers, slow_decay, web
from tests.engines.conftest import StartServer
from tests.engines.faults import planted
from tests.engines.greedy import gaps
from tests.engines.messages import Answer, Ask
from tests.engines.server import Server
from tests.engines.traffic import next_turns

pytestmark = pytest.mark.engine

CHATS, ANSWER = 8, 12
NOTHING = 1e-3
"""Nats by which another token may be likelier: rounding; one server alone has it too.
"""
RANDOM = random.Random(5)


def prompts(count: int, rng: random.Random = RANDOM) -> list[list[int]]:
    """Prompts of a few pages that begin differently, and end anywhere in one."""
    lengths = [200 + 37 * n for n in range(count)]
    return [[rng.randrange(3, 250) for _ in range(length)] for length in lengths]


@dataclass
class Pair:
    """Two servers of one model."""

    model: Path
    prefill: Server
    decode: Server
    router: str

    def through_router(self, asks: list[Ask]) -> list[Answer]:
        """Ask as clients do, several at a time."""
        direct, self.decode.url = self.decode.url, self.router
        try:
            return self.decode.ask_all(asks, 4)
        finally:
            self.decode.url = direct

    def decoded(
        self, prompt: list[int], params: Any, server: Server | None = None
    ) -> tuple[int, ...]:
        """What a server that is told of a prompt answers; by default the second one."""
        body = {
            "prompt": prompt,
            "max_tokens": ANSWER,
            "temperature": 0,
            "return_token_ids": True,
            "kv_transfer_params": params,
        }
        url = f"{(server or self.decode).url}/v1/completions"
        answer = web.post(url, json=body, timeout=300)
        answer.raise_for_status()
        return tuple(answer.json()["choices"][0]["token_ids"])

    def failures(self, reason: Reason) -> float:
        """How often the second server found what it was told to be of no use."""
        name = f"peer_load_failures{{{reason}}}"
        return self.decode.metrics().get(name, 0.0)


@pytest.fixture(scope="module")
def pair(
    start_server: StartServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("peers")
    model = slow_decay.write_nemotron_h(folder / "model")
    setup: dict[str, Any] = {
        "model": model,
        "dtype": "float32",
        "options": peer_servers.OPTIONS,
    }
    # Bytes go over TCP, as between machines.
    tcp = {"UCX_TLS": "tcp,self"}
    # On a CPU computing may be faster than reading: here one always reads what there
    # is to read, and the other one always computes.
    reads, computes = planted("slow_prefills"), planted("fast_prefills")
    with (
        start_server("prefill", **setup, environment=tcp | computes) as prefill,
        start_server("decode", **setup, environment=tcp | reads) as decode,
        peer_servers.router(prefill, decode, folder / "router.log") as router,
    ):
        yield Pair(model, prefill, decode, router)


def test_answers_are_those_of_one_server(pair: Pair) -> None:
    first = peer_servers.asks(prompts(CHATS), ANSWER)
    alone = pair.decode.ask_all(first, 4)
    second = next_turns(first, alone, seed=2)
    alone_again = pair.decode.ask_all(second, 4)
    pair.decode.reset_prefix_cache()
    before = pair.decode.metrics()
    answers = pair.through_router(first)
    after = pair.decode.metrics()
    answers_again = pair.through_router(second)
    for found, wanted in ((answers, alone), (answers_again, alone_again)):
        assert [one.error for one in found if one.error] == []
        assert [one.tokens for one in found] == [one.tokens for one in wanted]
    assert max(gaps(pair.model, first, answers)) < NOTHING
    assert max(gaps(pair.model, second, answers_again)) < NOTHING

    levels = peer_servers.until(
        pair.prefill, "peer_stores", pair.decode.metrics()["peer_loads"]
    )
    assert levels["peer_offers"] == levels["peer_used_bytes"] == 0
    now = pair.decode.metrics()
    print({n: now[n] - before.get(n, 0) for n in now if n.startswith("peer")})
    # All of a prompt but its last token comes from the other server, and of second
    # turns what this one does not have from the first.
    restored = after["peer_hit_tokens"] - before["peer_hit_tokens"]
    assert restored == sum(len(one.prompt) - 1 for one in first)
    assert now["peer_hit_tokens"] > after["peer_hit_tokens"]
    assert now["peer_loads"] == 2 * CHATS
    assert sum(n for name, n in now.items() if "load_failures{" in name) == 0


def test_what_a_request_makes_up_is_computed(pair: Pair) -> None:
    (prompt,) = prompts(1)
    pair.decode.reset_prefix_cache()
    wanted = pair.decode.ask(prompt, ANSWER).tokens
    params = peer_servers.prefilled(pair.prefill.url, prompt)
    own = params[OWN]
    for change, reason in (
        ({"fingerprint": "0" * 64}, Reason.PEER_MODEL),
        ({"ports": own["ports"] * 2}, Reason.PEER_RANKS),
        ({"format": "hybrid-peer/1"}, Reason.PEER_VERSION),
        ({"key": "0" * 64}, Reason.OTHER_TOKENS),
        ({"end": "many"}, Reason.PEER_MALFORMED),
        ({"host": "192.0.2.1"}, Reason.PEER_SECRET),
        ({"ports": [1]}, Reason.PEER_GONE),
        ({}, None),  # after all of that it is there
        ({"name": "0" * 32}, Reason.LEASE_OVER),
    ):
        pair.decode.reset_prefix_cache()
        name = f"peer_load_failures{{{reason}}}" if reason else "peer_loads"
        before = pair.decode.metrics().get(name, 0.0)
        told = params | {OWN: own | change}
        assert pair.decoded(prompt, told) == wanted, reason
        # A rank waits for an offer longer than a request does.
        peer_servers.until(pair.decode, name, before + 1)


def test_what_is_not_needed_is_declined(pair: Pair) -> None:
    """Because it is there, or because computing is faster."""
    there, faster = prompts(2, random.Random(7))
    name = f"peer_store_failures{{{Reason.DECLINED}}}"
    told = [peer_servers.prefilled(pair.prefill.url, there) for _ in range(2)]
    wanted = pair.decoded(there, told[0])  # all of the prompt is kept
    loads, before = pair.decode.metrics()["peer_loads"], pair.prefill.metrics()
    assert pair.decoded(there, told[1]) == wanted
    levels = peer_servers.until(pair.prefill, name, before.get(name, 0.0) + 1)
    assert levels["peer_offers"] == levels["peer_used_bytes"] == 0
    assert pair.decode.metrics()["peer_loads"] == loads

    before = pair.decode.metrics()
    wanted = pair.prefill.ask(faster, ANSWER).tokens
    pair.prefill.reset_prefix_cache()
    params = peer_servers.prefilled(pair.decode.url, faster)
    assert pair.decoded(faster, params, pair.prefill) == wanted
    levels = peer_servers.until(pair.decode, name, before.get(name, 0.0) + 1)
    assert levels["peer_offers"] == levels["peer_used_bytes"] == 0
    assert pair.prefill.metrics().get("peer_loads", 0) == 0


def test_a_server_that_dies_costs_a_computation(pair: Pair) -> None:
    """The last test of the pair: the first server is killed while it is read from."""
    all_prompts = prompts(3)
    pair.decode.reset_prefix_cache()
    wanted = [pair.decode.ask(one, ANSWER).tokens for one in all_prompts]
    pair.decode.reset_prefix_cache()
    told = [peer_servers.prefilled(pair.prefill.url, one) for one in all_prompts]
    assert pair.decoded(all_prompts[0], told[0]) == wanted[0]
    loads = pair.decode.metrics()["peer_loads"]
    peer_servers.stop(pair.prefill)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(pair.decoded, all_prompts[1], told[1])
        # It waits for the other server, and serves others meanwhile.
        assert pair.decode.ask(prompts(1)[0], 2).error is None
        assert not waiting.done()
        peer_servers.kill(pair.prefill)
        assert waiting.result(300) == wanted[1]
    assert pair.decoded(all_prompts[2], told[2]) == wanted[2]
    assert pair.failures(Reason.PEER_GONE) >= 3  # one was made up before
    assert pair.decode.metrics()["peer_loads"] == loads
    (late,) = peer_servers.asks(prompts(1), ANSWER)
    (answer,) = pair.through_router([late])
    assert max(gaps(pair.model, [late], [answer])) < NOTHING
    levels = pair.decode.metrics()
    used = [n for name, n in levels.items() if name.endswith("{used}") and n]
    assert used == [], "nothing is left in use"
