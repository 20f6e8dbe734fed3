# SPDX-License-Identifier: Apache-2.0
"""Each way to propose drafts that vLLM's CPU build runs: greedy, and nothing is lost.

Not here: MTP (`test_mtp_vllm.py`), n-gram and an oracle (`test_drafts_vllm.py`).
`ngram_gpu` asks for pinned memory, and `medusa` for heads that no published hybrid has.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hybrid_plugin.tools.demo.compare import NEAR_TIE
from hybrid_plugin.tools.prometheus_text import Metrics
from tests.engines import draft_heads, slow_decay, web
from tests.engines.conftest import StartServer
from tests.engines.drivers import Driver
from tests.engines.drivers.driver import MODEL
from tests.engines.greedy import gaps
from tests.engines.messages import Answer, Ask
from tests.engines.server import Server

pytest.importorskip("vllm")
pytestmark = pytest.mark.engine

DRAFTS = 3
TOKENS = 40
PROMPTS = (
    b"Return a list of the names in the module. ",
    b"The code for amber is 1234. ",
    b"aaaabaaaabaaaabaaaab",
    b"This exception is raised when ",
)
AGAIN = b" And then: "
WRITERS = {
    "eagle": draft_heads.write_eagle,
    "eagle3": draft_heads.write_eagle3,
    "draft_model": draft_heads.write_draft_model,
    "dflash": partial(draft_heads.write_block_drafter, model=MODEL, layers=(0, 2)),
}
HAS_SUFFIX = importlib.util.find_spec("arctic_inference") is not None


@pytest.mark.parametrize(
    "method",
    [
        *WRITERS,
        pytest.param(
            "suffix",
            marks=pytest.mark.skipif(
                not HAS_SUFFIX, reason="arctic-inference is not installed"
            ),
        ),
    ],
)
def test_drafters(
    start_server: StartServer, driver: Driver, method: str, tmp_path: Path
) -> None:
    """Second turns restore the first, but for a token that was sampled alone."""
    drafting: dict[str, Any] = {"method": method, "num_speculative_tokens": DRAFTS}
    if method in WRITERS:
        drafting["model"] = str(WRITERS[method](tmp_path / method))
    flags = ("--speculative-config", json.dumps(drafting))
    with start_server(method, flags=flags) as server:
        asks, answers = two_turns(server)
        verified = drafts_verified(driver, server)
    assert not any(answer.error for answer in answers)
    assert max(gaps(MODEL, asks, answers)) <= NEAR_TIE
    assert_restored(asks, answers)
    assert verified > 0


def two_turns(server: Server) -> tuple[list[Ask], list[Answer]]:
    """A first turn of each prompt and a second one behind it."""
    first = [Ask(tuple(prompt), TOKENS) for prompt in PROMPTS]
    answers = server.ask_all(first, len(first))
    second = [
        Ask((*ask.prompt, *answer.tokens, *AGAIN), TOKENS)
        for ask, answer in zip(first, answers, strict=True)
    ]
    return [*first, *second], answers + server.ask_all(second, len(second))


def assert_restored(asks: Sequence[Ask], answers: Sequence[Answer]) -> None:
    """All of each first turn was, but for its last token."""
    for ask, answer in list(zip(asks, answers, strict=True))[len(PROMPTS) :]:
        turn = len(ask.prompt) - len(AGAIN)
        assert turn - 1 <= answer.cached_tokens <= turn


def drafts_verified(driver: Driver, server: Server) -> float:
    """Steps that verified drafts."""
    found = Metrics(driver.metrics(server.url))
    return found.total("vllm:spec_decode_num_drafts_total") or 0.0


def test_adapters_verify_drafts(
    start_server: StartServer, driver: Driver, tmp_path: Path
) -> None:
    """With LoRA, n-gram drafts: answers are those of a model with merged weights.

    An adapter that is loaded in place finds nothing of the one before, nor of itself.
    The bundled model has experts, for which vLLM's adapters have no CPU code.
    """
    model, merged = slow_decay.write_nemotron_h(tmp_path / "model"), tmp_path / "merged"
    adapter = draft_heads.write_adapter(tmp_path / "adapter", model, merged)
    other, merged_other = tmp_path / "other", tmp_path / "merged-other"
    draft_heads.write_adapter(other, model, merged_other, seed=2)
    ngram = {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 1}
    flags = (
        "--speculative-config",
        json.dumps(ngram | {"num_speculative_tokens": DRAFTS}),
        "--enable-lora",
        f"--max-lora-rank={max(draft_heads.RANK, 8)}",
        "--lora-modules",
        f"adapted={adapter}",
    )
    with start_server(
        "lora",
        model=model,
        dtype="float32",
        flags=flags,
        # n-gram search would have PyTorch's threads wait for one another.
        environment={
            "NUMBA_NUM_THREADS": "1",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        },
    ) as server:
        asks, answers = two_turns(server)
        adapted = [ask_adapter(server.url, ask.prompt) for ask in asks[: len(PROMPTS)]]
        turns = [
            (*ask.prompt, *answer.tokens, *AGAIN)
            for ask, answer in zip(asks, adapted, strict=False)
        ]
        again = [ask_adapter(server.url, turn) for turn in turns]
        verified = drafts_verified(driver, server)
        load_in_place(server.url, other)
        prompts = [ask.prompt for ask in asks[: len(PROMPTS)]]
        replaced = [ask_adapter(server.url, prompt) for prompt in prompts]
        load_in_place(server.url, other)
        reloaded = [ask_adapter(server.url, prompt) for prompt in prompts]
        goes_on = (*prompts[0], *reloaded[0].tokens, *AGAIN)
        restored = ask_adapter(server.url, goes_on)
    assert max(gaps(model, asks, answers)) <= FLOAT_TIE
    of_other = [Ask(prompt, TOKENS) for prompt in prompts]
    assert max(gaps(merged_other, of_other, replaced)) <= FLOAT_TIE
    assert [one.tokens for one in reloaded] == [one.tokens for one in replaced]
    assert all(one.cached_tokens == 0 for one in [*replaced, *reloaded])
    assert restored.cached_tokens >= len(goes_on) - len(AGAIN) - 1
    asks = [Ask(turn, TOKENS) for turn in (*(tuple(p) for p in PROMPTS), *turns)]
    assert max(gaps(merged, asks, [*adapted, *again])) <= FLOAT_TIE
    assert max(gaps(model, asks, [*adapted, *again])) > 1, "the adapter changes answers"
    assert all(answer.cached_tokens == 0 for answer in adapted), "nothing is shared"
    assert_restored(asks, [*adapted, *again])
    assert verified > 0


FLOAT_TIE = 0.01
"""Nats between two implementations in float32."""


def load_in_place(url: str, adapter: Path) -> None:
    """Have the server's adapter replaced, under its name."""
    body = {"lora_name": "adapted", "lora_path": str(adapter), "load_inplace": True}
    web.post(f"{url}/v1/load_lora_adapter", json=body, timeout=300).raise_for_status()


def ask_adapter(url: str, prompt: Sequence[int]) -> Answer:
    """One request to the adapter, which answers greedily."""
    body = {
        "model": "adapted",
        "prompt": list(prompt),
        "max_tokens": TOKENS,
        "temperature": 0,
        "return_token_ids": True,
    }
    reply = web.post(f"{url}/v1/completions", json=body, timeout=300)
    reply.raise_for_status()
    found = reply.json()
    details = found["usage"].get("prompt_tokens_details") or {}
    return Answer(
        tuple(found["choices"][0]["token_ids"]),
        cached_tokens=details.get("cached_tokens") or 0,
    )
