# SPDX-License-Identifier: Apache-2.0
"""What requests may ask for besides tokens: answers behind a hit are those without it.

One server, whose answers without a hit are the reference: what differs is the cache.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from tests.engines import slow_decay, web
from tests.engines.conftest import StartServer
from tests.engines.drivers import Driver
from tests.engines.server import Server
from tests.engines.traffic import encode, system_prompt

pytestmark = pytest.mark.engine

ON_GPU = torch.cuda.is_available()
KNOWN, PROMPT = 256, 300
"""Tokens that a request before left in the cache, and those of the prompt."""
PATTERN = "(yes|no), [0-9]{3} times"
SCHEMA = {
    "type": "object",
    "properties": {"code": {"type": "integer"}, "ok": {"type": "boolean"}},
    "required": ["code", "ok"],
    "additionalProperties": False,
}
FEATURES: Mapping[str, Mapping[str, Any]] = {
    "greedy": {},
    "logprobs": {"logprobs": 3},
    "logprobs of the prompt": {"logprobs": 1, "echo": True},
    "several samples": {"n": 3, "temperature": 1.0, "seed": 11},
    "top-k and top-p": {"temperature": 1.0, "seed": 5, "top_k": 20, "top_p": 0.9},
    "stop string": {"stop": ["e", "Q"], "max_tokens": 60},
    "logit bias": {"logit_bias": {"97": 4.0}},
    "least length": {"min_tokens": 20, "max_tokens": 24},
    "penalties of the answer": {"presence_penalty": 1.5, "frequency_penalty": 0.5},
    "penalty of the prompt": {"repetition_penalty": 1.4},
    "regular expression": {"regex": PATTERN},
    "JSON schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "code", "schema": SCHEMA},
        },
        "max_tokens": 80,
    },
    "priority": {"priority": 3},
}
SEEDED = ("several samples", "top-k and top-p")
"""vLLM's CPU build ends at a seed, with the plugin and without ("CPU Generator does not
use offset"); SGLang goes by one in its deterministic mode only."""
FLAGS = {
    "vllm": ("--scheduling-policy=priority", "--enable-prompt-tokens-details"),
    "sglang": ("--enable-priority-scheduling", "--enable-cache-report"),
}


@pytest.fixture(scope="module")
def server(
    start_server: StartServer, driver: Driver, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    model = slow_decay.write_nemotron_h(tmp_path_factory.mktemp("model") / "nemotron-h")
    with start_server(
        "features", model=model, dtype="float32", flags=FLAGS[driver.name]
    ) as running:
        yield running


def prompt_of(number: int) -> list[int]:
    text = f"{number}. {system_prompt(random.Random(number), PROMPT)}"
    return list(encode(text))[:PROMPT]


def served_name(server: Server) -> str:
    found = web.get(f"{server.url}/v1/models", timeout=60.0).json()
    name: str = found["data"][0]["id"]
    return name


def send(server: Server, driver: Driver, **fields: Any) -> Mapping[str, Any]:
    """A completion, by the API that both engines have."""
    body = {
        "model": served_name(server),
        "max_tokens": 16,
        "temperature": 0.0,
        **fields,
    }
    pattern = body.pop("regex", None)
    if pattern is not None:
        own = {"structured_outputs": {"regex": pattern}}
        body |= own if driver.name == "vllm" else {"regex": pattern}
    found = web.post(f"{server.url}/v1/completions", json=body, timeout=300.0)
    assert found.status_code == 200, found.text
    answer: Mapping[str, Any] = found.json()
    return answer


def said(answer: Mapping[str, Any]) -> list[Any]:
    """What must be equal: texts, why they ended, and likeliest tokens."""
    return [
        (choice["index"], choice["text"], choice["finish_reason"], _tokens(choice))
        for choice in sorted(answer["choices"], key=lambda one: one["index"])
    ]


def _tokens(choice: Mapping[str, Any]) -> Any:
    logprobs = choice.get("logprobs")
    return None if logprobs is None else logprobs["tokens"]


def cached(answer: Mapping[str, Any]) -> int:
    details = answer["usage"].get("prompt_tokens_details") or {}
    return details.get("cached_tokens") or 0


@pytest.mark.parametrize("name", FEATURES)
def test_an_answer_behind_a_hit_is_that_without_one(
    server: Server, driver: Driver, name: str
) -> None:
    if name in SEEDED and not (driver.name == "vllm" and ON_GPU):
        pytest.skip("the engine does not go by seeds here")
    number = list(FEATURES).index(name)
    prompt, wanted = prompt_of(number), FEATURES[name]
    cold = send(server, driver, prompt=prompt, cache_salt=f"cold {name}", **wanted)
    warm: dict[str, Any] = {"cache_salt": f"warm {name}"}
    send(server, driver, prompt=prompt[:KNOWN], max_tokens=1, **warm)
    again = send(server, driver, prompt=prompt, **warm, **wanted)
    assert said(again) == said(cold)
    # Logprobs of the prompt are not kept: such a request is not served from the cache.
    hits = 0 if "echo" in wanted else wanted.get("n", 1)
    assert (cached(again) > 0) == (hits > 0) and cached(cold) < KNOWN
    texts = [choice["text"] for choice in again["choices"]]
    assert len(texts) == wanted.get("n", 1)
    if name == "regular expression":
        assert texts[0].split(",")[0] in ("yes", "no") and texts[0].endswith(" times")
    if name == "JSON schema":
        # This model may go on with white space to its last token.
        assert set(texts[0][1:]) <= set(' "abcdefghijklmnopqrstuvwxyz_:,0123456789-}')
    assert server.is_alive()


def test_nothing_is_left_in_use(server: Server) -> None:
    metrics = server.metrics()
    assert metrics["kv{used}"] == metrics["state{used}"] == 0
