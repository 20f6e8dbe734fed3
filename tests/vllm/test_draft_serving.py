# SPDX-License-Identifier: Apache-2.0
"""Which drafts are served, and the sentence about each of the others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

from hybrid_plugin.config import ConfigError, HybridConfig
from hybrid_plugin.engine import kernel_choice
from hybrid_plugin.engine.kernel_choice import Mixer
from hybrid_plugin.vllm import elastic, scheduler
from hybrid_plugin.vllm.kernels import records
from hybrid_plugin.vllm.speculation.serving import (
    obstacle_of_layers,
    obstacles,
    replays,
    takes_fewer_drafts,
)

Kind = MambaAttentionBackendEnum


def draft(*, hybrid: bool = False, window: int | None = None, **text: Any) -> Any:
    """A draft model's configuration."""
    return SimpleNamespace(
        is_hybrid=hybrid,
        hf_text_config=SimpleNamespace(**text),
        get_sliding_window=lambda: window,
    )


def said(method: str, model: Any = None, ranks: int = 1, **options: Any) -> list[str]:
    drafting = SimpleNamespace(method=method, draft_model_config=model)
    config: Any = SimpleNamespace(
        speculative_config=drafting,
        parallel_config=SimpleNamespace(data_parallel_size=ranks),
    )
    return list(obstacles(config, HybridConfig.from_mapping(options)))


@pytest.mark.parametrize(
    "method",
    ["ngram", "ngram_gpu", "suffix", "mtp", "eagle", "eagle3", "draft_model"],
)
def test_served(method: str) -> None:
    assert said(method, draft()) == []
    # A model with state layers is its own draft: their MTP layers have none.
    assert method == "draft_model" or said(method, draft(hybrid=True)) == []


def test_without_drafts_nothing_is_said() -> None:
    config: Any = SimpleNamespace(speculative_config=None)
    assert list(obstacles(config, HybridConfig(kernels="ours"))) == []
    assert obstacle_of_layers(config, {"s": state(Kind.MAMBA1)}) is None


def test_methods_that_were_not_tried() -> None:
    assert said("dspark") == [
        "speculative decoding by 'dspark' is not supported yet; choose another "
        "method, or drop --speculative-config."
    ]


@pytest.mark.parametrize(
    "model",
    [
        draft(window=128),
        draft(layer_types=["full_attention", "sliding_attention"]),
        draft(layer_types=["chunked_attention"]),
        draft(dflash_config={"use_swa": True}),
    ],
)
def test_draft_models_with_windows(model: Any) -> None:
    (sentence,) = said("eagle3", model)
    assert "windows" in sentence


def test_draft_models_with_states() -> None:
    (sentence,) = said("draft_model", draft(hybrid=True))
    assert "state layers" in sentence


@pytest.mark.parametrize("kernels", ["ours", "engine", "auto"])
def test_drafts_are_served_on_any_kernels(kernels: str) -> None:
    assert said("ngram", kernels=kernels) == []


@pytest.mark.parametrize(
    ("v2", "eager", "options", "served"),
    [
        (False, False, {"kernels": "ours"}, False),
        (False, False, {"draft_states": "replay"}, False),
        (False, False, {}, True),
        (False, True, {"kernels": "ours"}, True),
        (True, False, {"kernels": "ours"}, True),
    ],
)
def test_our_kernels_are_in_no_graph_that_is_chosen_by_a_pass_s_shape(
    v2: bool, eager: bool, options: Any, served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there are graphs: vLLM's V1 runner asks only how long rows are."""
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    config: Any = SimpleNamespace(
        speculative_config=SimpleNamespace(method="ngram", draft_model_config=None),
        parallel_config=SimpleNamespace(data_parallel_size=1),
        use_v2_model_runner=v2,
        model_config=SimpleNamespace(enforce_eager=eager),
    )
    found = list(obstacles(config, HybridConfig.from_mapping(options)))
    assert [one for one in found if "--enforce-eager" in one] == found
    assert (found == []) == served


def test_records_are_not_kept_beside_idle_ranks() -> None:
    assert said("ngram", draft_states="replay") == []
    assert said("ngram", ranks=2) == said("ngram", ranks=2, draft_states="columns")
    (sentence,) = said("ngram", ranks=2, draft_states="replay")
    assert "not served with data parallelism" in sentence


@pytest.mark.parametrize(
    ("changed", "mixer", "records"),
    [
        ({}, Mixer.GATED_DELTA_NET, True),
        ({"ranks": 2}, Mixer.GATED_DELTA_NET, False),
        ({"v2": False}, Mixer.GATED_DELTA_NET, False),
        ({"v2": False, "eager": True}, Mixer.GATED_DELTA_NET, True),
        ({"drafts": False}, Mixer.GATED_DELTA_NET, False),
        ({"kernels": "engine"}, Mixer.GATED_DELTA_NET, False),
        ({"draft_states": "columns"}, Mixer.GATED_DELTA_NET, False),
        ({"gpu": False}, Mixer.GATED_DELTA_NET, False),
        ({}, Mixer.MAMBA2, False),
        ({}, None, False),
    ],
)
def test_drafts_are_recorded_where_that_was_as_fast(
    changed: dict[str, Any],
    mixer: Mixer | None,
    records: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = {"drafts": True, "ranks": 1, "v2": True, "eager": False, "gpu": True}
    options = {k: changed[k] for k in ("kernels", "draft_states") if k in changed}
    told |= {k: v for k, v in changed.items() if k not in options}
    measured = {"vllm": frozenset({Mixer.GATED_DELTA_NET})}
    monkeypatch.setattr(kernel_choice, "RECORDS_AS_FAST", measured)
    monkeypatch.setattr(kernel_choice, "measured_here", lambda: told["gpu"])
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    config: Any = SimpleNamespace(
        speculative_config=object() if told["drafts"] else None,
        parallel_config=SimpleNamespace(data_parallel_size=told["ranks"]),
        use_v2_model_runner=told["v2"],
        model_config=SimpleNamespace(enforce_eager=told["eager"]),
    )
    asked = HybridConfig.from_mapping(options)
    assert replays(config, asked, lambda: mixer) == records


def test_deterministic() -> None:
    assert said("ngram", deterministic="prefix", elastic=False) == [
        "deterministic is not served with speculative decoding; drop "
        "--speculative-config."
    ]


def state(kind: Kind) -> MambaSpec:
    return MambaSpec(
        block_size=1024, shapes=((3, 5),), dtypes=(torch.float32,), mamba_type=kind
    )


PAGES = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.half)


@pytest.mark.parametrize(
    ("kind", "served"),
    [
        (Kind.GDN_ATTN, True),
        (Kind.MAMBA2, True),
        (Kind.SHORT_CONV, not current_platform.is_cpu()),
        (Kind.LINEAR, False),
        (Kind.MAMBA1, False),
    ],
)
def test_kinds_of_layers(kind: Kind, served: bool) -> None:
    config: Any = SimpleNamespace(speculative_config=object())
    found = obstacle_of_layers(config, {"a": PAGES, "s": state(kind)})
    if served:
        assert found is None
    else:
        assert found == (
            f"vLLM does not verify drafts in layer s, of the kind {kind.name}; drop "
            "--speculative-config."
        )


@pytest.mark.parametrize(
    ("method", "v2", "ranks", "fewer"),
    [
        ("mtp", False, 1, True),
        ("ngram", False, 1, True),
        ("suffix", False, 1, False),
        ("medusa", False, 1, False),
        ("custom_class", False, 1, False),
        ("ngram_gpu", True, 1, True),
        ("mtp", True, 2, False),
    ],
)
def test_who_proposes_fewer_drafts(
    method: str, v2: bool, ranks: int, fewer: bool
) -> None:
    config: Any = SimpleNamespace(
        speculative_config=SimpleNamespace(method=method),
        use_v2_model_runner=v2,
        parallel_config=SimpleNamespace(data_parallel_size=ranks),
    )
    assert takes_fewer_drafts(config) == fewer
    config.speculative_config = None
    assert not takes_fewer_drafts(config)


@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize("drafts", [False, True])
def test_scheduling_ahead_needs_the_v2_runner(
    drafts: bool, v2: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config: Any = SimpleNamespace(
        scheduler_config=SimpleNamespace(async_scheduling=True),
        speculative_config=object() if drafts else None,
        use_v2_model_runner=v2,
    )
    made: Any = lambda **arguments: "made"  # noqa: E731
    monkeypatch.setattr(scheduler, "HybridAsyncScheduler", made)
    if drafts and not v2:
        with pytest.raises(ConfigError, match="--no-async-scheduling"):
            scheduler.create_scheduler(config)
    else:
        assert scheduler.create_scheduler(config) == "made"


@pytest.mark.parametrize(
    ("changed", "rows"),
    [
        ({}, 41),  # one is in no pool yet
        ({"cache": 1 << 40}, 300),
        ({"cache": 1}, 24),
        ({"cache": 1, "captured": 0}, 10),
        ({"cache": 1, "captured": None, "graphs": 0}, 1),
        ({"most": 8}, 8),
    ],
)
def test_records_are_kept_for_sequences_that_can_run(
    changed: dict[str, Any], rows: int
) -> None:
    """For those that have a state, and for what a graph is captured with."""
    told = {"cache": 40 * (20 + 5), "captured": 96, "graphs": 10, "most": 300} | changed
    config: Any = SimpleNamespace(
        num_speculative_tokens=3,
        compilation_config=SimpleNamespace(max_cudagraph_capture_size=told["captured"]),
        scheduler_config=SimpleNamespace(max_num_seqs=told["most"]),
    )
    states = [
        MambaSpec(
            block_size=1024,
            shapes=shapes,
            dtypes=dtypes,
            page_size_padded=1 << 20,
        )
        for shapes, dtypes in (
            (((5,),), (torch.float32,)),
            (((3,), (1, 2)), (torch.int8, torch.int8)),
        )
    ]
    assert records.most_rows(config, states, told["cache"], told["graphs"]) == rows


def test_the_cache_has_what_weights_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 1 << 30
    monkeypatch.setattr(
        type(current_platform), "get_device_total_memory", lambda *_: 100 * gib
    )

    def most(said: int | None = None, **options: Any) -> int:
        config: Any = SimpleNamespace(
            additional_config={"hybrid_plugin": options},
            cache_config=SimpleNamespace(
                gpu_memory_utilization=0.5, kv_cache_memory_bytes=said
            ),
        )
        return elastic.most_cache_bytes(config, weights=10 * gib)

    assert most() == 40 * gib
    assert most(said=60 * gib) == 60 * gib, "vLLM takes what it is told"
    assert most(gpu_memory_budget="8GiB") == 8 * gib
    assert most(said=4 * gib, gpu_memory_budget="8GiB") == 4 * gib
