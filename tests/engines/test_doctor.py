# SPDX-License-Identifier: Apache-2.0
"""What the doctor foresees is what a server does."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engines.conftest import StartServer
from tests.engines.drivers import Driver, Setup
from tests.engines.warm_start import completed

pytestmark = pytest.mark.engine

CACHE_MIB = 64
"""As the drivers' servers have it."""

DOCTOR = "import sys; from hybrid_plugin.cli import main; sys.exit(main(sys.argv[1:]))"

ATTENTION_ONLY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
}


def _ask(driver: Driver, setup: Setup, *flags: str) -> tuple[int, dict[str, Any]]:
    """The doctor's exit status and what it says about the model."""
    launch = driver.launch(setup, port=1)
    words = list(launch.command)
    first = next(i for i, word in enumerate(words) if word.startswith("--"))
    own = words[first:]
    own = [f for f in own if not f.startswith(("--model-path", "--enable-hybrid"))]
    command = [
        sys.executable,
        "-c",
        DOCTOR,
        "doctor",
        "--json",
        f"--engine={driver.name}",
        f"--model={setup.model}",
        f"--cache-gib={CACHE_MIB / 1024}",
        "--",
        *own,
        *flags,
    ]
    done = completed(replace(launch, command=command))
    (engine,) = json.loads(done.stdout)["engines"]
    return done.returncode, engine


def test_layout_is_that_of_the_server(
    driver: Driver, start_server: StartServer
) -> None:
    fixed = {"elastic": False}
    status, engine = _ask(driver, Setup(options=fixed))
    assert (status, engine["problems"]) == (0, [])
    model = engine["model"]
    assert model["prospect"] == "served"
    assert model["page_size"] == driver.page_size
    assert (model["attention_layers"], model["state_layers"]) == (2, 6)
    if driver.name != "vllm":
        return  # the sizes of SGLang's pools are given by flags here
    with start_server("foreseen", options=fixed) as server:
        log = re.sub(r"\s+", " ", server.log_text())
    pools = re.search(r"pools: (\d+) KV pages of (\d+) tokens .* and (\d+) state", log)
    assert pools is not None
    pages, page_size, slots = map(int, pools.groups())
    assert (model["pages"], model["slots"]) == (pages, slots)
    assert model["page_size"] == page_size


def test_granules_of_elastic_pools_are_foreseen(driver: Driver) -> None:
    status, engine = _ask(driver, Setup(options={"elastic": True}))
    assert (status, engine["problems"]) == (0, [])
    model = engine["model"]
    granules = model["granules"]
    assert set(granules) == {"kv", "state"}
    for granule in granules.values():
        assert granule["bytes"] > granule["ids"] > 0
    most = model["pages"] // granules["kv"]["ids"] * granules["kv"]["bytes"]
    assert 0.9 * CACHE_MIB < most / 2**20 <= CACHE_MIB


def test_conflict_is_foreseen(driver: Driver) -> None:
    flags, sentence = next(iter(driver.conflicts.values()))
    status, engine = _ask(driver, Setup(), *flags)
    assert status == 1
    assert engine["model"]["prospect"] == "refused"
    assert sentence in engine["model"]["reason"]


def test_model_that_the_engine_cannot_start(driver: Driver, tmp_path: Path) -> None:
    config = ATTENTION_ONLY | {"architectures": ["NobodyHasThisForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    status, engine = _ask(driver, Setup(model=tmp_path))
    assert status == 1
    assert engine["model"]["prospect"] == "fails"
    assert "NobodyHasThisForCausalLM" in engine["model"]["reason"]


def test_model_without_states_is_left_alone(driver: Driver, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(ATTENTION_ONLY))
    status, engine = _ask(driver, Setup(model=tmp_path))
    assert (status, engine["problems"]) == (0, [])
    assert engine["model"]["prospect"] == "left alone"
    assert "no state layers" in engine["model"]["reason"]
