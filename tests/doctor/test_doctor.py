# SPDX-License-Identifier: Apache-2.0
"""The doctor on engines that are as published, newer, or moved; none is imported."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybrid_plugin.cli import main
from hybrid_plugin.config import DiskOptions, PeerOptions
from hybrid_plugin.core.memory.elastic_plan import plan_elastic
from hybrid_plugin.core.memory.layout import (
    AttentionGroup,
    CacheLayout,
    PoolSizes,
    StateGroup,
)
from hybrid_plugin.core.tiers.host_plan import plan_host, rows_of
from hybrid_plugin.engine.outlook import Outlook, Prospect
from hybrid_plugin.tools.doctor import installed, points, render, report
from hybrid_plugin.tools.doctor.installed import Engine
from hybrid_plugin.tools.doctor.report import EngineReport, Question, Report
from hybrid_plugin.upstream.contracts import contracts_of
from hybrid_plugin.upstream.matrix import Row, load, newest
from tests.compat.engines import rows_at_hand, source_of, view_of
from tests.compat.rename import ENDING, renamed_copy

SERVED = next(iter(r for r in rows_at_hand() if r.engine == "vllm"), None)

pytestmark = pytest.mark.skipif(SERVED is None, reason="no vLLM source is at hand")
beyond_the_newest = pytest.mark.skipif(
    newest(load(), "vllm") != SERVED,
    reason="the newest vLLM's source is not at hand; `make contracts` gets it",
)


def _row() -> Row:
    assert SERVED is not None
    return SERVED


def _published(row: Row) -> Engine:
    root = source_of(row)
    assert root is not None
    return Engine(row.engine, row.distribution, row.version, root)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make the doctor find these engines, and nothing else."""
    monkeypatch.setattr(installed, "loading_problem", lambda engine: None)

    def install(*engines: Engine) -> None:
        by_name = {engine.name: engine for engine in engines}
        monkeypatch.setattr(installed, "find_engine", by_name.get)

    return install


def _doctor(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, Any]:
    status = main(["doctor", "--no-import", "--json", *flags])
    return status, json.loads(capsys.readouterr().out)


def test_engine_as_published(install: Any, capsys: pytest.CaptureFixture[str]) -> None:
    install(_published(_row()))
    status, found = _doctor(capsys)
    assert status == 0
    assert found["ok"] is True
    (engine,) = found["engines"]
    assert (engine["version"], engine["warnings"]) == (_row().version, [])
    assert engine["standing"].startswith("in the compatibility matrix: served")
    assert {point["status"] for point in engine["hook_points"]} == {"ok"}
    applying = [c for c in contracts_of("vllm") if c.applies_to(_row().version)]
    assert len(engine["hook_points"]) == len(applying)


@beyond_the_newest
def test_newer_version_that_fits_is_warned_about(
    install: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    install(replace(_published(_row()), version="7.0.0"))
    status, found = _doctor(capsys)
    assert status == 0
    (engine,) = found["engines"]
    assert engine["warnings"] == [
        "vLLM 7.0.0 is newer than the compatibility matrix: all hook points hold, but "
        "no test has run on it."
    ]


def test_version_between_those_of_the_matrix(
    install: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    install(replace(_published(_row()), version="0.32.99"))
    _, found = _doctor(capsys)
    assert found["engines"][0]["standing"] == "not in the compatibility matrix"


@beyond_the_newest
def test_newer_version_that_moved_something_is_refused_by_name(
    install: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = "vllm.v1.worker.utils:create_kv_cache_views"
    contract = next(c for c in contracts_of("vllm") if c.target == target)
    root = source_of(_row())
    assert root is not None
    copy = renamed_copy(view_of(_row()), root, contract, tmp_path / "engine")
    (copy / "vllm" / "views.py").write_text("def create_kv_cache_views(raw): ...\n")
    install(replace(_published(_row()), version="7.0.0", root=copy))
    status, found = _doctor(capsys)
    assert status == 1
    (engine,) = found["engines"]
    (wrong,) = [p for p in engine["hook_points"] if p["status"] != "ok"]
    assert (wrong["target"], wrong["status"]) == (target, "moved")
    # It stays where this module imported it from.
    places = "vllm.v1.kv_cache_interface, vllm.views"
    assert wrong["problem"] == f"{target} is missing; now in {places}"
    assert engine["problems"] == [wrong["problem"]]


def test_text_names_what_is_wrong(
    install: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = "vllm.v1.core.sched.scheduler:Scheduler._preempt_request"
    contract = next(c for c in contracts_of("vllm") if c.target == target)
    root = source_of(_row())
    assert root is not None
    copy = renamed_copy(view_of(_row()), root, contract, tmp_path / "engine")
    install(replace(_published(_row()), root=copy))
    assert main(["doctor", "--no-import"]) == 1
    out = capsys.readouterr().out
    assert f"missing: {target} is missing" in out
    assert out.endswith("Serving would not work.\n")
    assert ENDING not in out


def test_no_engine(install: Any, capsys: pytest.CaptureFixture[str]) -> None:
    install()
    status, found = _doctor(capsys, "--engine=sglang")
    assert status == 1
    assert found["problems"] == ["SGLang is not installed in this environment."]
    assert main(["doctor", "--no-import"]) == 1
    assert "vLLM or SGLang is not installed" in capsys.readouterr().out


def test_engine_that_would_not_load_the_plugin(
    install: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    install(_published(_row()))
    monkeypatch.undo()
    monkeypatch.setattr(installed, "find_engine", lambda name: _published(_row()))
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    monkeypatch.setattr(points, "check_engine", lambda engine, live: [])
    status, found = _doctor(capsys, "--engine=vllm")
    assert status == 1
    (problem,) = found["engines"][0]["problems"]
    assert problem == "VLLM_PLUGINS is set and does not name vllm_hybrid: add it there"
    monkeypatch.setattr(installed.metadata, "entry_points", lambda group: [])
    status, found = _doctor(capsys, "--engine=vllm")
    assert status == 1
    assert "vllm_hybrid of vllm.general_plugins is not installed" in str(found)


def test_model_takes_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--no-import", "--model", "some/model"]) == 2
    assert "leave --no-import out" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["a/model"], ["--", "--no-such-flag"]])
def test_flags_are_not_passed_over_for_want_of_a_model(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--no-import", *flags]) == 2
    printed = capsys.readouterr()
    assert f"Not looked at: {flags[-1]}" in printed.err and printed.out == ""


@pytest.mark.parametrize("memory", ["nan", "0", "inf"])
def test_models_are_laid_out_in_some_memory(
    memory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", "--cache-gib", memory])
    assert f"{memory} is no number above 0" in capsys.readouterr().err


def test_entry_points_are_those_of_the_project() -> None:
    for engine in ("vllm", "sglang"):
        assert installed.loading_problem(engine) is None


LAYOUT = CacheLayout(
    page_size=16,
    attention=(AttentionGroup(("a", "b"), 512),),
    states=(StateGroup(("c", "d", "e"), 1024),),
)


def _report(outlook: Outlook) -> Report:
    engine = EngineReport(_published(_row()), "in the matrix", [], outlook=outlook)
    return Report(Question(cache_bytes=1 << 30), [engine])


def test_layout_is_shown() -> None:
    outlook = Outlook(
        Prospect.SERVED, layout=LAYOUT, sizes=PoolSizes(101, 11), max_model_len=4096
    )
    text = render.as_text(_report(outlook))
    assert "page: 16 tokens, 1.0 KiB over 2 attention layers" in text
    assert "slot: 3.0 KiB over 3 state layers, as much as 3.0 pages" in text
    assert "1024.0 MiB of cache: 101 pages and 11 slots" in text
    assert "at once: 0 sequences of 4096 tokens, 1 of 1024" in text
    model = render.as_json(_report(outlook))["engines"][0]["model"]
    assert model["page_bytes"] == 1024
    assert model["slot_bytes"] == 3072
    assert (model["pages"], model["slots"]) == (101, 11)
    assert model["sequences_of_1024"] == 1


def test_slots_bound_what_runs_at_once() -> None:
    outlook = Outlook(
        Prospect.SERVED, layout=LAYOUT, sizes=PoolSizes(9001, 4), max_model_len=512
    )
    text = render.as_text(_report(outlook))
    assert "at once: 3 sequences of 512 tokens" in text


def test_granules_of_pools_that_share_their_memory() -> None:
    shared = plan_elastic(
        LAYOUT, 64 << 12, block_bytes=4096, max_model_len=256, max_sequences=4
    )
    outlook = Outlook(
        Prospect.SERVED,
        layout=shared.layout,
        sizes=shared.sizes,
        shared=shared,
        max_model_len=256,
    )
    text = render.as_text(_report(outlook))
    # 8 blocks of 512 bytes fill one of 4096, in two layers; a slot of 3072 leaves 1024.
    assert "granules: 8 pages of kv (8.0 KiB), 4 slots of state (12.0 KiB)" in text
    assert "1024.0 MiB of cache: up to 256 pages and up to 84 slots" in text
    model = render.as_json(_report(outlook))["engines"][0]["model"]
    assert model["granules"]["kv"] == {"ids": 8, "bytes": 8192}
    assert model["granules"]["state"] == {"ids": 4, "bytes": 12288}
    assert model["sequences_of_max_model_len"] == shared.sequences(256)


def test_host_memory_is_shown() -> None:
    host = plan_host(rows_of(LAYOUT), 1 << 20)
    outlook = Outlook(
        Prospect.SERVED,
        layout=LAYOUT,
        sizes=PoolSizes(101, 11),
        host=host,
        max_model_len=512,
    )
    text = render.as_text(_report(outlook))
    kv, state = host.rows("kv"), host.rows("state")
    assert f"MiB of host memory: {kv} pages of kv, {state} slots of state, or " in text
    assert f"the KV of {kv * 16} tokens at most" in text
    model = render.as_json(_report(outlook))["engines"][0]["model"]
    assert model["host_memory"]["rows"] == {"kv": kv, "state": state}
    assert model["host_memory"]["bytes"] == host.budget <= 1 << 20


def test_files_behind_it_are_shown() -> None:
    disk = DiskOptions("/var/cache/hybrid", 100 * LAYOUT.page_bytes + 1)
    outlook = Outlook(
        Prospect.SERVED,
        layout=LAYOUT,
        sizes=PoolSizes(101, 11),
        disk=disk,
        max_model_len=512,
    )
    text = render.as_text(_report(outlook))
    tokens = 100 * LAYOUT.page_size
    assert f"of files in /var/cache/hybrid; the KV of {tokens} tokens at most" in text
    model = render.as_json(_report(outlook))["engines"][0]["model"]
    assert model["disk"] == {"path": "/var/cache/hybrid", "bytes": disk.size}


def test_where_peers_read_is_shown() -> None:
    outlook = Outlook(
        Prospect.SERVED,
        layout=LAYOUT,
        sizes=PoolSizes(101, 11),
        peers=PeerOptions("127.0.0.1:7600"),
        max_model_len=512,
    )
    text = render.as_text(_report(outlook))
    assert "peers read and are read at 127.0.0.1:7600" in text
    model = render.as_json(_report(outlook))["engines"][0]["model"]
    assert model["peers"] == {"listen": "127.0.0.1:7600"}


@pytest.mark.parametrize("prospect", [Prospect.REFUSED, Prospect.FAILS])
def test_model_that_cannot_be_served(
    prospect: Prospect, install: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(_published(_row()))
    monkeypatch.setattr(points, "check_engine", lambda engine, live: [])
    outlook = Outlook(prospect, "it is too large.")
    module = type("Adapter", (), {"foresee": staticmethod(lambda *_: outlook)})
    monkeypatch.setattr(report.importlib, "import_module", lambda name: module)
    found = report.examine(Question(engine="vllm", model="m"))
    assert not found.ok
    assert "problem: it is too large." in render.as_text(found)
    assert found.engines[0].outlook == outlook


def test_states_alone_are_shown_without_kv() -> None:
    outlook = Outlook(
        Prospect.SERVED,
        layout=replace(LAYOUT, attention=()),
        sizes=PoolSizes(801, 11),
        max_model_len=512,
    )
    text = render.as_text(_report(outlook))
    assert "page: 16 tokens, and no KV: no layer attends" in text
    assert "slot: 3.0 KiB over 3 state layers\n" in text
    assert "1024.0 MiB of cache: 11 slots" in text
    assert "at once: 10 sequences of 512 tokens" in text
    model = render.as_json(_report(outlook))["engines"][0]["model"]
    assert (model["page_bytes"], model["attention_layers"], model["slots"]) == (
        0,
        0,
        11,
    )
