# SPDX-License-Identifier: Apache-2.0
"""SGLang's arguments as its own resolution leaves them, with the plugin and without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang")

from hybrid_plugin.config import ConfigError, HybridConfig
from hybrid_plugin.engine import kernel_choice
from hybrid_plugin.engine.kernel_choice import Mixer
from hybrid_plugin.sglang import arguments
from hybrid_plugin.sglang.arguments import BACKEND, _conflicts, _page_size
from hybrid_plugin.sglang.speculation import arguments as speculation
from hybrid_plugin.sglang.speculation.arguments import (
    MOST_REQUESTS,
    conflicts,
    running_requests,
    unrecorded,
)
from tests.engines.drivers.driver import MODEL, Setup
from tests.engines.drivers.sglang import SglangDriver
from tests.sglang.resolving import FOUND

DRIVER = SglangDriver()


class View:
    """As much of SGLang's arguments as the page size depends on."""

    speculative_eagle_topk: int | None = None
    speculative_ngram_max_bfs_breadth = 10
    disaggregation_mode = "null"

    def __init__(
        self,
        page_size: int | None,
        chunk: int | None,
        drafts: str | None = None,
        backend: str | None = None,
    ) -> None:
        self.page_size = page_size
        self.chunked_prefill_size = chunk
        self.speculative_algorithm = drafts
        self.attention_backend = backend


@pytest.mark.parametrize(
    ("flag", "option", "chunk", "size"),
    [
        (None, None, 8192, 16),
        (None, None, None, 16),
        (None, None, 100, 4),
        (None, None, 101, 1),
        (None, None, 96, 16),
        (64, None, 8192, 64),
        (64, 64, 8192, 64),
        (None, 32, 96, 32),
        (None, 32, None, 32),
    ],
)
def test_page_size(
    flag: int | None, option: int | None, chunk: int | None, size: int
) -> None:
    assert _page_size(View(flag, chunk), HybridConfig(page_size=option)) == size


def test_a_model_may_have_pages_of_its_own() -> None:
    for given in (None, 64):
        assert _page_size(View(None, 128), HybridConfig(page_size=given), 64) == 64
    with pytest.raises(ConfigError, match="pages of 64 tokens for this model"):
        _page_size(View(32, 128), HybridConfig(), 64)
    with pytest.raises(ConfigError, match="no multiple of the page size 64"):
        _page_size(View(None, 96), HybridConfig(), 64)


@pytest.mark.parametrize(
    ("drafts", "topk", "backend", "size"),
    [
        ("ngram", None, "triton", 1),
        ("NGRAM", None, None, 1),
        ("NGRAM", None, "flashinfer", 16),
        ("EAGLE", 4, "triton", 16),
        ("EAGLE", 4, "torch_native", 1),
        ("NEXTN", 1, "torch_native", 16),
        ("EAGLE3", None, "torch_native", 16),
    ],
)
def test_trees_have_pages_where_their_attention_takes_them(
    drafts: str, topk: int | None, backend: str | None, size: int
) -> None:
    view = View(None, 96, drafts, backend)
    view.speculative_eagle_topk = topk
    assert _page_size(view, HybridConfig()) == size
    assert _page_size(View(32, 96, drafts, backend), HybridConfig()) == 32


class Drafts:
    """As much of SGLang's arguments as says whether drafts are served."""

    enable_multi_layer_eagle = speculative_adaptive = enable_mixed_chunk = False
    speculative_draft_window_size: int | None = None
    disaggregation_mode = "null"
    max_running_requests: int | None = None
    speculative_eagle_topk: int | None = None
    attn_dp_size = 1

    def __init__(self, algorithm: str | None, **flags: int | str) -> None:
        self.speculative_algorithm = algorithm
        vars(self).update(flags)


@pytest.mark.parametrize(
    "name", ["nextn", "EAGLE", "EAGLE3", "STANDALONE", "NGRAM", "dflash", "DSPARK"]
)
def test_drafts_that_are_served(name: str) -> None:
    assert list(conflicts(Drafts(name), windows=False)) == []


@pytest.mark.parametrize(
    ("view", "windows", "sentence"),
    [
        (Drafts("UNO"), False, "--speculative-algorithm UNO is not supported yet"),
        (Drafts("NGRAM"), True, "models with windows"),
        (
            Drafts("EAGLE", enable_multi_layer_eagle=True),
            False,
            "drop --enable-multi-layer-eagle",
        ),
        (Drafts("EAGLE", speculative_adaptive=True), False, "drop --speculative-adap"),
        (Drafts("EAGLE", enable_mixed_chunk=True), False, "drop --enable-mixed-chunk"),
        (
            Drafts("DFLASH", speculative_draft_window_size=64),
            False,
            "drop --speculative-draft-window-size",
        ),
        (
            Drafts("DSPARK", disaggregation_mode="prefill"),
            False,
            "DSPARK is not served in prefill servers yet",
        ),
    ],
)
def test_drafts_that_are_not(view: Drafts, windows: bool, sentence: str) -> None:
    (found,) = conflicts(view, windows=windows)
    assert sentence in found


def test_numbers_of_drafts_that_differ_by_request_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SGLANG_RAGGED_VERIFY_MODE", "compact")
    (found,) = conflicts(Drafts("DSPARK"), windows=False)
    assert "set SGLANG_RAGGED_VERIFY_MODE to static, and not to compact" in found
    assert list(conflicts(Drafts("DFLASH"), windows=False)) == []


@pytest.mark.parametrize(
    ("algorithm", "breadth", "served"),
    [
        ("EAGLE", 1, True),
        ("NEXTN", None, True),
        ("EAGLE", 2, False),
        ("NGRAM", None, False),
    ],
)
def test_models_whose_index_keys_stand_for_several_tokens_verify_chains(
    algorithm: str, breadth: int | None, served: bool
) -> None:
    view = Drafts(algorithm)
    view.speculative_eagle_topk = breadth
    refusal = (
        "where index keys stand for several tokens each, SGLang can verify chains of "
        "drafts only, and n-grams are trees; use NEXTN or EAGLE with "
        "--speculative-eagle-topk 1."
    )
    found = list(conflicts(view, windows=False, rings=True))
    assert found == ([] if served else [refusal])


def test_nor_blocks_of_drafts() -> None:
    (found,) = conflicts(Drafts("DSPARK"), windows=False, rings=True)
    assert found.startswith("DSPARK is not served yet where index keys stand")


def test_drafts_for_compressed_keys_are_not() -> None:
    (found,) = conflicts(Drafts("NGRAM"), windows=False, compressed=True)
    assert "models with compressed keys" in found


REPLAY = HybridConfig(draft_states="replay")


@pytest.mark.parametrize(
    ("view", "options", "most"),
    [
        (Drafts("EAGLE"), REPLAY, {"max_running_requests": MOST_REQUESTS}),
        (Drafts("EAGLE", attn_dp_size=4), REPLAY, {"max_running_requests": 8192}),
        (Drafts("EAGLE", max_running_requests=7), REPLAY, {}),
        (Drafts("EAGLE"), HybridConfig(), {}),
        (Drafts(None), REPLAY, {}),
    ],
    ids=["replay", "four ranks", "said otherwise", "columns", "no drafts"],
)
def test_records_let_as_many_requests_run_as_without_drafts(
    view: Drafts,
    options: HybridConfig,
    most: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(speculation, "mixer_of", lambda _: Mixer.GATED_DELTA_NET)
    assert running_requests(view, options, None) == most


def test_records_are_kept_by_default_where_they_were_measured_to_be_as_fast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = {"sglang": frozenset({Mixer.GATED_DELTA_NET}), "vllm": frozenset()}
    monkeypatch.setattr(kernel_choice, "RECORDS_AS_FAST", known)
    monkeypatch.setattr(kernel_choice, "measured_here", lambda: True)
    kept = {
        mixer
        for mixer in (*Mixer, None)
        if kernel_choice.are_recorded(HybridConfig(), lambda m=mixer: m, "sglang")
    }
    assert kept == {Mixer.GATED_DELTA_NET}

    def delta() -> Mixer:
        return Mixer.GATED_DELTA_NET

    assert not kernel_choice.are_recorded(HybridConfig(), delta, "vllm")
    for options in (
        HybridConfig(kernels="engine"),
        HybridConfig(draft_states="columns"),
    ):
        assert not kernel_choice.are_recorded(options, delta, "sglang")
    monkeypatch.setattr(kernel_choice, "measured_here", lambda: False)
    assert not kernel_choice.are_recorded(HybridConfig(), delta, "sglang")
    assert kernel_choice.are_recorded(REPLAY, lambda: None, "vllm")


def test_a_server_with_records_does_not_lower_how_many_requests_run() -> None:
    drafts = ("--speculative-algorithm=NGRAM", "--speculative-num-draft-tokens=4")
    columns = DRIVER.decide(Setup(flags=drafts))
    records = DRIVER.decide(Setup(flags=drafts, options={"draft_states": "replay"}))
    assert (columns.refusal, records.refusal) == (None, None)
    assert columns.settings["max_running_requests"] == 48
    assert records.settings["max_running_requests"] == MOST_REQUESTS


def test_records_are_refused_for_layers_without_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for mixer in (*Mixer, None):
        monkeypatch.setattr(speculation, "mixer_of", lambda _, mixer=mixer: mixer)
        found = list(unrecorded(Drafts("NGRAM"), REPLAY, None))
        served = mixer in (Mixer.GATED_DELTA_NET, Mixer.KDA, Mixer.MAMBA2)
        assert served != bool(found)
        assert served or "draft_states is replay" in found[0]
        assert list(unrecorded(Drafts("NGRAM"), HybridConfig(), None)) == []
        assert list(unrecorded(Drafts(None), REPLAY, None)) == []


def test_without_drafts_no_flag_about_them_counts() -> None:
    view = Drafts(None, enable_mixed_chunk=True, speculative_adaptive=True)
    assert list(conflicts(view, windows=True)) == []


@pytest.mark.parametrize(
    ("flag", "option", "chunk", "sentence"),
    [
        (16, 32, 96, "--page-size 16 and the option page_size 32 contradict"),
        (
            None,
            16,
            100,
            "--chunked-prefill-size 100 is no multiple of the page",
        ),
        (
            16,
            None,
            100,
            "--chunked-prefill-size 100 is no multiple of the page",
        ),
    ],
)
def test_page_sizes_that_contradict(
    flag: int | None, option: int | None, chunk: int, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        _page_size(View(flag, chunk), HybridConfig(page_size=option))


def test_a_chunk_of_100_tokens_starts_as_it_does_without_the_plugin() -> None:
    flags = ("--chunked-prefill-size=100",)
    stock = DRIVER.decide(Setup(plugin=False, flags=flags))
    ours = DRIVER.decide(Setup(flags=flags))
    assert (stock.refusal, ours.refusal) == (None, None)
    assert ours.active
    assert ours.settings["chunked_prefill_size"] == 100
    assert ours.settings["page_size"] == 4


@pytest.mark.parametrize("strategy", ["extra_buffer", "extra_buffer_lazy"])
def test_a_choice_for_the_cache_that_is_replaced_has_no_effect(strategy: str) -> None:
    drafts = ("--speculative-algorithm=NGRAM", "--speculative-num-draft-tokens=4")
    plain = DRIVER.decide(Setup(flags=drafts))
    flags = (*drafts, f"--mamba-radix-cache-strategy={strategy}")
    ours = DRIVER.decide(Setup(flags=flags))
    assert (ours.refusal, ours.active) == (None, True)
    assert ours.settings == plain.settings
    assert ours.settings["mamba_radix_cache_strategy"] == "no_buffer"
    (said,) = set(ours.lines) - set(plain.lines)
    assert said == (
        f"hybrid-plugin: --mamba-radix-cache-strategy {strategy} is for SGLang's own "
        "cache and has no effect."
    )


@pytest.mark.parametrize(
    ("flag", "value", "shown"),
    [
        ("--mamba-full-memory-ratio", "0.5", "--mamba-full-memory-ratio is for"),
        ("--radix-eviction-policy", "lfu", "--radix-eviction-policy lfu is for"),
    ],
)
def test_flags_of_the_cache_that_is_replaced_are_said_to_have_no_effect(
    flag: str, value: str, shown: str
) -> None:
    ours = DRIVER.decide(Setup(flags=(f"{flag}={value}",)))
    assert (ours.refusal, ours.active) == (None, True)
    assert sum(shown in line for line in ours.lines) == 1
    assert not any("no effect" in line for line in DRIVER.decide(Setup()).lines)


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ({}, None),
        ({"disable_radix_cache": True}, "switches prefix caches off"),
        ({"is_embedding": True}, "a server of embeddings or scores"),
        ({"chunked_prefill_size": -1}, "computes prompts of this model"),
        ({"disable_radix_cache": True, "radix_cache_backend": None}, None),
    ],
)
def test_what_sglang_finds_out_later_is_heeded(
    found: dict[str, Any], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last steps change what the first ones had."""
    plain = {"radix_cache_backend": BACKEND, "chunked_prefill_size": 96}
    order: list[str] = []

    def previous(arguments: Any) -> None:
        order.append("SGLang's own")

    def resolved(arguments: Any) -> Any:
        order.append("looked at")
        return Given(**plain | found)

    monkeypatch.setattr(arguments.overrides, "resolved_view", resolved)
    if reason is None:
        arguments.confirm(None, previous)
    else:
        with pytest.raises(SystemExit, match=f"{reason}.*give --disable-radix-cache"):
            arguments.confirm(None, previous)
    assert order == ["SGLang's own", "looked at"]


def test_multi_item_scoring_excludes_caches() -> None:
    """SGLang computes prompts whole then, and switches its caches off."""
    flags = ("--enable-mis", "--attention-backend=flashinfer")
    decision = DRIVER.decide(Setup(flags=flags))
    assert decision.refusal is not None
    assert "give --disable-radix-cache" in decision.refusal
    idle = DRIVER.decide(Setup(flags=(*flags, "--disable-radix-cache")))
    assert idle.refusal is None and not idle.active


@pytest.mark.parametrize(
    "variable", ["SGLANG_ENABLE_POST_CAPTURE_KV_SIZING", "SGLANG_RADIX_FORCE_MISS"]
)
def test_what_the_environment_may_not_ask_for(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages whose memory is settled later; hits hidden from prompts that go on."""
    for value in "01":
        monkeypatch.setenv(variable, value)
        said = [one for one in _conflicts(Given(device="cuda")) if variable in one]
        assert len(said) == int(value)


def test_enabled_false_is_stock() -> None:
    stock = DRIVER.decide(Setup(plugin=False))
    ours = DRIVER.decide(Setup(options={"enabled": False}))
    assert not ours.active
    assert ours.settings == stock.settings
    assert ours.lines == ('hybrid-plugin is inactive: the option "enabled" is false.',)


Resolve = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def resolve() -> Iterator[Resolve]:
    """Backend and page size of a server with these flags, in a process of its own."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HYBRID_")}
    with subprocess.Popen(
        [sys.executable, "-m", "tests.sglang.resolving"],
        env=clean | {"SGLANG_PLATFORM": "hybrid_cpu"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as forking:
        assert forking.stdin is not None and forking.stdout is not None
        to, back = forking.stdin, forking.stdout

        def resolved(*flags: str, **variables: str) -> list[Any]:
            to.write(json.dumps([["--skip-tokenizer-init", *flags], variables]) + "\n")
            to.flush()
            for line in back:
                if line.startswith(FOUND):
                    found: list[Any] = json.loads(line.removeprefix(FOUND))
                    return found
            raise AssertionError("the process has ended")

        yield resolved


def test_a_configuration_file_asks_for_the_plugin(
    resolve: Resolve, tmp_path: Path
) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(
        f"model-path: {MODEL}\n"
        "enable-hybrid-plugin: true\n"
        "hybrid-config:\n  page_size: 32\n"
    )
    assert resolve("--config", str(file)) == ["hybrid", 32]


def test_an_abbreviated_flag_asks_for_the_plugin(resolve: Resolve) -> None:
    assert resolve(f"--model-path={MODEL}", "--enable-hyb") == ["hybrid", 16]


def test_without_it_nothing_does(resolve: Resolve) -> None:
    backend, _ = resolve(f"--model-path={MODEL}")
    assert backend != "hybrid"


def test_the_environment_gives_options_to_the_command_line(resolve: Resolve) -> None:
    flags = (f"--model-path={MODEL}", "--enable-hybrid-plugin")
    variables = {"HYBRID_CONFIG": '{"page_size": 64}'}
    assert resolve(*flags, **variables) == ["hybrid", 64]
    more = ("--hybrid-config", '{"page_size": 32}')
    assert resolve(*flags, *more, **variables) == ["hybrid", 32]


def test_host_memory_is_free_for_every_rank_of_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setup = Setup(options={"host_memory": "2GiB"}, flags=("--tp-size=2",))
    monkeypatch.setattr(arguments.host_memory, "free_bytes", lambda: 4 << 30)
    assert DRIVER.decide(setup).refusal is None
    monkeypatch.setattr(arguments.host_memory, "free_bytes", lambda: 3 << 30)
    refusal = DRIVER.decide(setup).refusal
    assert refusal is not None
    assert "host_memory of 2.00 GiB for each of 2 ranks" in refusal


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--dp-size=2",), "one replica"),
        (
            ("--tp-size=2", "--nnodes=2", "--dist-init-addr=127.0.0.1:5"),
            "one machine",
        ),
        (("--enable-lora", "--max-lora-rank=8", "--lora-target-modules=all"), "lora"),
    ],
    ids=["replicas", "machines", "adapters"],
)
def test_files_that_ranks_cannot_share_or_name_are_refused(
    flags: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    disk = {"path": str(tmp_path), "size": "1GiB"}
    options = {"host_memory": "1MiB", "disk": disk}
    refusal = DRIVER.decide(Setup(options=options, flags=flags)).refusal
    assert refusal is not None and refusal.startswith("hybrid-plugin: disk ")
    assert words in refusal and "leave" in refusal
    without = Setup(options={"host_memory": "1MiB"}, flags=flags)
    assert "disk" not in str(DRIVER.decide(without).refusal)


class Given:
    """Arguments of which all that are not given are off."""

    def __init__(self, **flags: object) -> None:
        vars(self).update(flags)

    def __getattr__(self, name: str) -> bool:
        return False


@pytest.mark.parametrize(
    ("mixed", "ranks", "flag"), product([False, True], [1, 2], "01")
)
def test_results_of_passes_that_also_decode_are_not_waited_for(
    mixed: bool, ranks: int, flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that must agree would; alone the plugin launches such a pass first."""
    monkeypatch.setenv("SGLANG_DISABLE_CONSECUTIVE_PREFILL_OVERLAP", flag)
    view = Given(enable_mixed_chunk=mixed, attn_dp_size=ranks, device="cuda")
    said = [one for one in _conflicts(view) if "--enable-mixed-chunk" in one]
    assert bool(said) == (mixed and ranks == 2 and flag == "1")


def test_servers_that_generate_nothing_are_left_alone() -> None:
    """No commands would run before their passes."""
    decision = DRIVER.decide(Setup(flags=("--is-embedding",)))
    assert not decision.active and decision.refusal is None
    assert any("embeddings or scores" in line for line in decision.lines)


@pytest.mark.parametrize("flag", ["routed_experts", "indexer_topk"])
def test_what_is_noted_by_the_place_of_a_token_is_not_returned(flag: str) -> None:
    for asked in (False, True):
        view = Given(**{f"enable_return_{flag}": asked})
        option = f"--enable-return-{flag.replace('_', '-')}"
        assert any(option in one for one in _conflicts(view)) == asked
