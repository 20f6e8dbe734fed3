# SPDX-License-Identifier: Apache-2.0
"""What the plugin serves of SGLang's prefill and decode servers, by their arguments."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from hybrid_plugin.config import HybridConfig
from hybrid_plugin.sglang import disaggregation
from hybrid_plugin.sglang.disaggregation import send_what_is_computed
from tests.engines.drivers.driver import Setup
from tests.engines.drivers.sglang import SglangDriver

DRIVER = SglangDriver()
PREFILL = "--disaggregation-mode=prefill"
NIXL = "--disaggregation-transfer-backend=nixl"


@pytest.fixture
def no_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose layers keep KV and states, and nothing beside them."""
    monkeypatch.setattr(
        disaggregation, "kept_beside", lambda _, windows: ["windows"] * windows
    )
    monkeypatch.setattr(disaggregation, "keeps_states_alone", lambda _: False)


def view_of(**given: Any) -> Any:
    """Arguments of a prefill server."""
    plain = {
        "disaggregation_mode": "prefill",
        "disaggregation_decode_enable_radix_cache": False,
        "pp_size": 1,
        "optimistic_prefill_attempts": 0,
        "enable_pd_role_switch": False,
    }
    return SimpleNamespace(**(plain | given))


@pytest.mark.usefixtures("no_kind")
@pytest.mark.parametrize(
    ("given", "options", "windows", "sentence"),
    [
        ({}, {}, False, None),
        ({"disaggregation_mode": "null", "pp_size": 2}, {}, True, None),
        ({"pp_size": 2}, {}, False, "stages of a pipeline are not served in prefill"),
        ({"optimistic_prefill_attempts": 1}, {}, False, "prefills ahead of their"),
        ({"enable_pd_role_switch": True}, {}, False, "servers that change their role"),
        ({}, {}, True, "windows are not served in prefill servers yet"),
        ({}, {"host_memory": "1GiB"}, False, None),
        (
            {},
            {"verify_fraction": 0.5},
            False,
            "verify_fraction has a server ask itself",
        ),
        ({}, {"deterministic": "prefix"}, False, "deterministic was not tested in"),
        (
            {},
            {"host_memory": 1, "peers": {}},
            False,
            "peers is another way from server",
        ),
    ],
)
def test_what_is_not_served_in_prefill_servers(
    given: dict[str, Any], options: dict[str, Any], windows: bool, sentence: str | None
) -> None:
    config = HybridConfig.from_mapping(options)
    found = list(
        disaggregation.obstacles(view_of(**given), config, None, windows=windows)
    )
    assert len(found) == (sentence is not None)
    assert not found or found[0].startswith(str(sentence))


def test_decode_servers_are_left_alone() -> None:
    view = view_of(disaggregation_mode="decode")
    assert "keep no prefixes" in str(disaggregation.reason_to_stay_idle(view))
    view.disaggregation_decode_enable_radix_cache = True
    assert "is SGLang's own" in str(disaggregation.reason_to_stay_idle(view))
    assert disaggregation.reason_to_stay_idle(view_of()) is None
    decision = DRIVER.decide(Setup(flags=("--disaggregation-mode=decode", NIXL)))
    assert not decision.active and decision.refusal is None
    assert "decode servers keep no prefixes" in decision.lines[0]


@pytest.mark.parametrize(("flags", "size"), [((), 1), (("--page-size=32",), 32)])
def test_pages_are_those_of_decode_servers(flags: tuple[str, ...], size: int) -> None:
    decision = DRIVER.decide(Setup(flags=(PREFILL, NIXL, *flags)))
    assert decision.active
    assert decision.settings["page_size"] == size


def test_a_paused_prompt_is_sent_as_far_as_it_is_computed() -> None:
    paused: Any = SimpleNamespace(extend_end=96, origin_input_ids=[0] * 300)
    send_what_is_computed([paused])
    assert paused.tmp_end_idx == 96
