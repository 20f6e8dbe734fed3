# SPDX-License-Identifier: Apache-2.0
"""One engine computes prompts, and another engine goes on with them.

HYBRID_OTHER_PYTHON names the interpreter of an environment with the one that computes
prompts: vLLM, where this one has SGLang.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang")

from hybrid_plugin.tiers.peers.params import OWN
from tests.engines import web
from tests.engines.conftest import StartServer
from tests.engines.faults import planted
from tests.engines.greedy import gaps
from tests.engines.peer_prefill import MODEL, setup
from tests.engines.peer_servers import asks, prefilled
from tests.engines.server import Server
from tests.engines.warm_start import ROOT

OTHER = os.environ.get("HYBRID_OTHER_PYTHON")
CHATS, ANSWER = 5, 12
NOTHING = 1e-3
"""Nats by which another token may be likelier: rounding."""
RANDOM = random.Random(6)

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not OTHER, reason="no other engine is named"),
]


def decoded(decode: Server, prompt: list[int], params: dict[str, Any]) -> list[int]:
    """What this engine answers that is told of a prompt, as a router tells SGLang."""
    told = {OWN: json.dumps(params[OWN])}
    sampling = {"max_new_tokens": ANSWER, "temperature": 0, "custom_params": told}
    body = {"input_ids": prompt, "sampling_params": sampling}
    answer = web.post(f"{decode.url}/generate", json=body, timeout=300)
    answer.raise_for_status()
    found: list[int] = answer.json()["output_ids"]
    return found


def test_prompts_of_one_engine_are_answered_by_another(
    start_server: StartServer, tmp_path: Path
) -> None:
    log = tmp_path / "of the other.log"
    with log.open("wb") as errors:
        prefill = subprocess.Popen(
            [str(OTHER), "-W", "ignore", "-m", "tests.engines.peer_prefill", tmp_path],
            cwd=ROOT,
            env=os.environ | {"SGLANG_PLATFORM": "", "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    assert prefill.stdout is not None
    url = prefill.stdout.readline().strip()
    assert url, log.read_text()[-6000:]
    lengths = [200 + 41 * n for n in range(CHATS)]
    prompts = [[RANDOM.randrange(3, 250) for _ in range(count)] for count in lengths]
    requests = asks(prompts, ANSWER)
    # On a CPU computing may be faster than reading.
    reads = planted("slow_prefills")
    with start_server("decode", **setup(tmp_path), environment=reads) as decode:
        alone = decode.ask_all(requests, 2)
        decode.reset_prefix_cache()
        before = decode.metrics()
        told = [prefilled(url, prompt) for prompt in prompts]
        answers = list(map(decoded, [decode] * CHATS, prompts, told))
        now = decode.metrics()
    prefill.communicate(timeout=120)
    print(now)
    assert [tuple(one) for one in answers] == [one.tokens for one in alone]
    assert max(gaps(tmp_path / MODEL, requests, alone)) < NOTHING
    assert now["peer_loads"] == CHATS
    restored = now["peer_hit_tokens"] - before["peer_hit_tokens"]
    assert restored == sum(len(prompt) - 1 for prompt in prompts)
