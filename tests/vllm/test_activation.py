# SPDX-License-Identifier: Apache-2.0
"""What is vLLM's own about activation; the rest is in tests/engines."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from hybrid_plugin.config import ConfigError, HybridConfig
from hybrid_plugin.core.policy.message_boundaries import Delimiters
from hybrid_plugin.vllm import page_size, ranks
from hybrid_plugin.vllm.activation import (
    SCHEDULER,
    TEMPLATE_KEY,
    conflicts,
    is_active,
    logger,
    read_options,
)
from hybrid_plugin.vllm.scheduler import _delimiters
from hybrid_plugin.vllm.servable import UnservableError
from tests.engines.drivers.driver import MODEL, Setup
from tests.engines.drivers.vllm import CONFLICTS, VllmDriver
from tests.vllm.hybrid_models import STATES_ALONE, WINDOWS, write

DRIVER = VllmDriver()


def config_of(**arguments: Any) -> Any:
    """The engine configuration `vllm serve` would come to."""
    return EngineArgs(
        model=str(MODEL),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=1024,
        **arguments,
    ).create_engine_config()


def test_marks_of_an_active_plugin() -> None:
    config = config_of()
    assert config.scheduler_config.scheduler_cls == SCHEDULER
    assert config.cache_config.mamba_cache_mode == "none"
    assert config.cache_config.mamba_block_size == 1024
    assert ".Hybrid" in config.parallel_config.worker_cls


@pytest.mark.parametrize(
    ("flag", "value"),
    [("enable_dbo", True), ("ubatch_size", 2), ("enable_elastic_ep", True)],
)
def test_what_changes_passes_or_engines_behind_our_back_is_refused(
    flag: str, value: Any
) -> None:
    config = config_of()
    before = list(conflicts(config))
    setattr(config.parallel_config, flag, value)
    (added,) = set(conflicts(config)) - set(before)
    assert f"--{flag.replace('_', '-')}" in added


def test_flags_for_vllms_own_cache_are_said_to_have_no_effect(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    config_of()
    assert "has no effect" not in caplog.text
    config_of(num_gpu_blocks_override=8, kv_cache_metrics=True)
    assert "--num-gpu-blocks-override counts blocks of vLLM's own" in caplog.text
    assert "--kv-cache-metrics looks at vLLM's own cache" in caplog.text


@pytest.mark.parametrize("memory", ["30GiB", "2x"])
def test_replicas_share_the_host_memory_of_a_machine(
    memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each engine core is told later that it is alone."""
    monkeypatch.setattr(ranks, "free_bytes", lambda: 100 << 30)
    options = {"additional_config": {"hybrid_plugin": {"host_memory": memory}}}
    config = config_of(data_parallel_size=3, **options)
    assert is_active(config)
    config.parallel_config.data_parallel_size_local = 1
    assert ranks.on_this_machine(config) == 3
    assert ranks.on_this_machine(config_of(**options)) == 1
    if memory == "30GiB":
        with pytest.raises(ValueError, match="for each of 4 ranks is more than"):
            config_of(data_parallel_size=4, **options)


@pytest.mark.parametrize("options", [{}, {"elastic": False}])
def test_sleep_mode_needs_elastic_pools(options: dict[str, bool]) -> None:
    """vLLM itself takes the flag on a GPU only."""
    config = config_of(additional_config={"hybrid_plugin": options})
    config.model_config.enable_sleep_mode = True
    sentences = [one for one in conflicts(config) if "--enable-sleep-mode" in one]
    sentence = (
        "sleep mode needs elastic pools; leave the options out that fix them, or drop "
        "--enable-sleep-mode."
    )
    assert sentences == ([sentence] if options else [])


def test_experts_are_not_returned_for_restored_tokens() -> None:
    """vLLM takes the flag for models with experts only."""
    sentence = (
        "vLLM notes the experts of whole pages alone, and hits end within pages; drop "
        "--enable-return-routed-experts."
    )
    config = config_of()
    assert sentence not in conflicts(config)
    config.aux_output_config.enable_return_routed_experts = True
    assert sentence in conflicts(config)


def test_option_and_environment_switch_it_off_alike() -> None:
    by_option = DRIVER.decide(Setup(options={"enabled": False}))
    by_environment = DRIVER.decide(Setup(plugin=False))
    assert not by_option.active
    assert by_option.settings["cache_config.mamba_cache_mode"] == "align"
    assert by_option.settings == by_environment.settings
    assert by_option.lines == (
        'hybrid-plugin is inactive: the option "enabled" is false.',
    )
    assert by_environment.lines == (
        "hybrid-plugin is inactive: HYBRID_PLUGIN=0 is set.",
    )


def test_windows_without_states_are_left_to_vllm_unless_asked_for(
    tmp_path: Path,
) -> None:
    model = write(tmp_path, "Gemma3ForCausalLM", WINDOWS["Gemma3ForCausalLM"])
    stock = DRIVER.decide(Setup(model=model, plugin=False))
    left = DRIVER.decide(Setup(model=model))
    assert not left.active and left.settings == stock.settings
    assert left.lines == (
        "hybrid-plugin is inactive: the model has no state layers, and vLLM caches its "
        'windows itself; set the option "enabled" to true to have the plugin serve it.',
    )
    assert DRIVER.decide(Setup(model=model), demanded=True).active
    refused = DRIVER.decide(
        Setup(model=model, flags=CONFLICTS["scheduler class"][0]), demanded=True
    )
    assert refused.refusal is not None and "--scheduler-cls" in refused.refusal


@pytest.mark.parametrize("architecture", STATES_ALONE)
def test_states_alone_are_served_though_vllm_would_not_cache_them(
    tmp_path: Path, architecture: str
) -> None:
    model = write(tmp_path, architecture, STATES_ALONE[architecture])
    stock = DRIVER.decide(Setup(model=model, plugin=False))
    assert stock.settings["cache_config.enable_prefix_caching"] is False
    served = DRIVER.decide(Setup(model=model))
    assert served.active
    assert served.lines == ("hybrid-plugin is active: it takes over prefix caching.",)
    assert served.settings["cache_config.mamba_block_size"] == 1024


def test_a_flag_about_caching_counts_for_states_alone(tmp_path: Path) -> None:
    name = "Mamba2ForCausalLM"
    model = write(tmp_path, name, STATES_ALONE[name])
    stock = DRIVER.decide(Setup(model=model, plugin=False))
    off = DRIVER.decide(Setup(model=model, prefix_cache=False))
    assert not off.active and off.settings == stock.settings
    assert off.lines == ("hybrid-plugin is inactive: prefix caching is switched off.",)
    asked = Setup(model=model, flags=("--enable-prefix-caching",))
    assert DRIVER.decide(asked).active
    drafting = DRIVER.decide(Setup(model=model, flags=DRAFTS))
    assert not drafting.active and "without attention layers" in drafting.lines[0]
    # Where it steps aside, vLLM does what it does alone, cached or not.
    for flags in ((), ("--enable-prefix-caching",)):
        flags += CONFLICTS["scheduler class"][0]
        left = DRIVER.decide(Setup(model=model, flags=flags))
        alone = DRIVER.decide(Setup(model=model, flags=flags, plugin=False))
        assert not left.active and left.settings == alone.settings


@pytest.mark.parametrize(("flags", "sentence"), CONFLICTS.values(), ids=CONFLICTS)
def test_conflict_steps_aside_with_a_warning(
    flags: tuple[str, ...], sentence: str
) -> None:
    decision = DRIVER.decide(Setup(flags=flags))
    assert not decision.active
    assert decision.settings["scheduler_config.scheduler_cls"] != SCHEDULER
    assert decision.lines == (f"hybrid-plugin is inactive: {sentence}",)


PEERS = {"host_memory": "1MiB", "peers": {"weights": "any"}}


def test_peers_beside_a_connector_are_refused() -> None:
    """Where the plugin stepped aside, the server would compute what peers have."""
    flags, sentence = CONFLICTS["connector"]
    decision = DRIVER.decide(Setup(flags=flags, options=PEERS))
    assert decision.refusal is not None and sentence in decision.refusal
    decision = DRIVER.decide(
        Setup(flags=("--no-enable-prefix-caching",), options=PEERS)
    )
    assert decision.refusal is not None
    assert "peers needs the plugin, and prefix caching" in decision.refusal
    assert DRIVER.decide(Setup(options=PEERS)).active


DRAFTS = ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}')


@pytest.mark.parametrize("options", [{}, {"kernels": "ours"}])
def test_drafts_are_served(options: dict[str, str]) -> None:
    assert DRIVER.decide(Setup(flags=DRAFTS, options=options)).active


def test_the_environment_gives_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """They travel with the configuration, to processes without the variable too."""
    monkeypatch.setenv("HYBRID_CONFIG", '{"page_size": 64, "elastic": false}')
    given = {"hybrid_plugin": {"page_size": 32}}
    config = config_of(additional_config=given)
    monkeypatch.delenv("HYBRID_CONFIG")
    assert read_options(config) == HybridConfig(page_size=32, elastic=False)


def test_the_environment_switches_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRID_CONFIG", '{"enabled": false}')
    assert not is_active(config_of())
    given = {"hybrid_plugin": {"enabled": True}}
    assert is_active(config_of(additional_config=given))


def test_a_bad_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRID_CONFIG", "page_size=16")
    with pytest.raises(Exception, match="HYBRID_CONFIG takes JSON"):
        config_of()


def test_attention_that_counts_vllms_blocks_is_left_to_vllm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.platforms import current_platform

    backends = [
        SimpleNamespace(get_name=lambda name=name: name, supports_block_size=bool)
        for name in ("TRITON_ATTN", "FLEX_ATTENTION")
    ]
    monkeypatch.setattr(
        type(current_platform), "_find_non_ssm_backends", lambda *_: backends
    )
    with pytest.raises(
        UnservableError, match="backend FLEX_ATTENTION sizes its tables"
    ):
        page_size.choose(config_of())
    backends.pop()
    page_size.choose(config_of())


def test_page_sizes_that_contradict() -> None:
    config = config_of(
        block_size=64, additional_config={"hybrid_plugin": {"page_size": 32}}
    )
    with pytest.raises(ConfigError, match="--block-size 64 and the option"):
        page_size.choose(config)


def test_options_are_an_object() -> None:
    with pytest.raises(Exception, match="takes a JSON object of options"):
        config_of(additional_config={"hybrid_plugin": []})


def test_a_moved_hook_point_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    monkeypatch.delattr(Scheduler, "_mamba_block_aligned_split")
    refusal = DRIVER.decide(Setup()).refusal
    assert refusal is not None
    assert "does not fit vLLM" in refusal
    assert "Scheduler._mamba_block_aligned_split is missing" in refusal


def test_what_drafts_need_is_looked_at_where_there_are_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.v1.worker.block_table import BlockTable

    monkeypatch.delattr(BlockTable, "add_row")
    assert DRIVER.decide(Setup()).active
    refusal = DRIVER.decide(Setup(flags=DRAFTS)).refusal
    assert refusal is not None
    assert "BlockTable.add_row is missing" in refusal


TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}~{% endfor %}"


def arguments_of(*flags: str) -> EngineArgs:
    """What a server with these flags builds its configuration from."""
    parser = make_arg_parser(FlexibleArgumentParser())
    model = ("--model", str(MODEL), "--dtype", "bfloat16", "--max-model-len", "1024")
    arguments: EngineArgs = AsyncEngineArgs.from_cli_args(
        parser.parse_args([*model, *flags])
    )
    return arguments


@pytest.mark.parametrize("literal", [False, True])
def test_the_servers_chat_template_reaches_the_scheduler(
    tmp_path: Path, literal: bool
) -> None:
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    options = '{"hybrid_plugin": {"system_snapshot_min_tokens": 8}}'
    config = arguments_of(
        *("--chat-template", TEMPLATE if literal else str(tmp_path / "chat.jinja")),
        *("--additional-config", options),
    ).create_engine_config()
    assert is_active(config)
    found = _delimiters(config, read_options(config))
    assert found == Delimiters(tuple(b"[system]"), tuple(b"~"))


def test_a_chat_template_travels_only_where_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags = ("--chat-template", TEMPLATE)
    assert arguments_of(*flags).additional_config == {}
    monkeypatch.setenv("HYBRID_CONFIG", '{"system_snapshot_min_tokens": 8}')
    assert arguments_of(*flags).additional_config == {TEMPLATE_KEY: TEMPLATE}
    assert arguments_of().additional_config == {}
    monkeypatch.setenv("HYBRID_PLUGIN", "0")
    assert arguments_of(*flags).additional_config == {}
