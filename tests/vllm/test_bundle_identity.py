# SPDX-License-Identifier: Apache-2.0
"""What tells the files of one vLLM from those of another, and what cannot be told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.kv_cache_interface import (
    KVCacheSpec,
    KVQuantMode,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from hybrid_plugin.config import ConfigError, DiskOptions, PeerOptions
from hybrid_plugin.core.memory.layout import PoolSizes
from hybrid_plugin.tiers.identity import Identity
from hybrid_plugin.vllm import activation, planning
from hybrid_plugin.vllm.bundle_identity import identity_of
from hybrid_plugin.vllm.storable import obstacles
from tests.vllm.fakes import SPECS
from tests.vllm.test_activation import config_of

DISK = DiskOptions("/var/cache/hybrid", 1 << 30)
ATTENTION = SPECS["a0"]
ENGINE: Any = SimpleNamespace(
    cache_config=SimpleNamespace(prefix_cache_retention_interval=None)
)


def write(folder: Path, weights: bytes = b"weights") -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"hidden_size": 64}))
    (folder / "model.safetensors").write_bytes(weights)
    return str(folder)


def identity(
    model: str, specs: dict[str, KVCacheSpec] | None = None, **changes: Any
) -> Identity:
    """Of an engine with that model, but for the changes."""
    fields = {
        "model": model,
        "revision": None,
        "hf_config_path": None,
        "hf_overrides": {},
        "dtype": torch.bfloat16,
        "quantization": None,
        "drafter": None,
        "ranks": 1,
        "rank": 0,
    } | changes
    drafter = fields.pop("drafter")
    beside = SimpleNamespace(model=drafter, revision=None)
    engine: Any = SimpleNamespace(
        model_config=SimpleNamespace(**fields),
        load_config=SimpleNamespace(load_format="auto"),
        speculative_config=drafter and SimpleNamespace(draft_model_config=beside),
        parallel_config=SimpleNamespace(tensor_parallel_size=fields["ranks"]),
    )
    named = specs or {"layers.0.attn": ATTENTION, "layers.1.mamba": SPECS["s0"]}
    windows = sum(isinstance(spec, SlidingWindowSpec) for spec in named.values())
    sizes = PoolSizes(4, 4, (4,) * windows)
    config = planning.make_config(ENGINE, planning.make_groups(named), sizes)
    return identity_of(engine, config, DISK, fields["rank"])


def test_equal_models_have_one_name(tmp_path: Path) -> None:
    model = write(tmp_path / "model")
    one = identity(model)
    assert one == identity(model, hf_config_path="")
    assert one.layers == ("0 full attention", "1 state")
    assert (one.kv_dtype, one.rank_name) == ("float32", "rank-0-of-1")


def test_ranks_share_a_name_and_have_a_part_each(tmp_path: Path) -> None:
    model = write(tmp_path / "model")
    ranks = [identity(model, ranks=2, rank=rank) for rank in range(2)]
    assert len({rank.fingerprint() for rank in ranks}) == 1
    assert [rank.rank_name for rank in ranks] == ["rank-0-of-2", "rank-1-of-2"]
    assert ranks[0].fingerprint() != identity(model).fingerprint()


def test_whatever_changes_what_tokens_mean_changes_the_name(tmp_path: Path) -> None:
    model = write(tmp_path / "model")
    other = write(tmp_path / "other", b"other weights")
    drafts = write(tmp_path / "drafts", b"of a drafter")
    attention: Any = ATTENTION
    half = replace(attention, dtype=torch.float16)
    quantised = replace(
        attention, dtype=torch.uint8, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR
    )
    near = SlidingWindowSpec(
        block_size=16,
        num_kv_heads=2,
        head_size=8,
        dtype=torch.float32,
        sliding_window=32,
    )
    latent = MLAAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32
    )
    state = SPECS["s0"]
    found = [
        identity(model),
        identity(other),
        identity(
            model,
            hf_config_path=write(tmp_path / "described", b"x"),
            hf_overrides={"rope_theta": 1},
        ),
        identity(model, hf_overrides={"rope_theta": 1}, dtype=torch.float16),
        identity(model, hf_overrides={"rope_theta": 1e6}),
        identity(model, quantization="fp8"),
        identity(model, drafter=drafts),
        identity(model, {"l.0.attn": half, "l.1.m": state}),
        identity(model, {"l.0.attn": quantised, "l.1.m": state}),
        identity(model, {"l.0.attn": latent, "l.1.m": state}),
        identity(model, {"l.0.attn": attention, "l.2.attn": near, "l.1.m": state}),
        identity(model, {"l.0.attn": attention, "l.3.m": state}),
    ]
    assert len({one.fingerprint() for one in found}) == len(found)
    assert identity(model, drafter=model) == found[0], "drafts by its own layers"


def test_a_model_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"disk needs the config\.json"):
        identity(str(tmp_path))


def engine(**changes: Any) -> Any:
    """What is asked of a configuration, but for the changes."""
    fields = {
        "data_parallel_size": 1,
        "nnodes": 1,
        "hf_overrides": {},
        "multimodal_config": None,
        "load_format": "auto",
        "calculate_kv_scales": False,
    } | changes
    everything = SimpleNamespace(**fields)
    return SimpleNamespace(
        parallel_config=everything,
        model_config=everything,
        load_config=everything,
        cache_config=everything,
    )


REFUSED: dict[str, dict[str, Any]] = {
    "disk serves one replica, and with data parallelism": {"data_parallel_size": 2},
    "disk serves one machine": {"nnodes": 2},
    "disk cannot tell what a function makes of a model": {"hf_overrides": lambda c: c},
    "disk needs images that are named by their content": {
        "multimodal_config": SimpleNamespace(mm_processor_cache_gb=0)
    },
    "disk needs KV scales that are equal everywhere": {"calculate_kv_scales": True},
    "disk cannot tell dummy weights from others": {"load_format": "dummy"},
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_no_file_can_say_is_refused(sentence: str) -> None:
    (found,) = obstacles(engine(**REFUSED[sentence]), DISK)
    (of_peers,) = obstacles(engine(**REFUSED[sentence]), PeerOptions())
    assert of_peers.startswith(sentence.replace("disk", "peers"))
    assert found.startswith(sentence) and found.count(". ") == 0


def test_what_files_can_say_is_not() -> None:
    images = SimpleNamespace(mm_processor_cache_gb=4)
    assert not list(obstacles(engine(multimodal_config=images), DISK))
    named = replace(DISK, weights="zeros")
    assert not list(obstacles(engine(load_format="dummy"), named))


def test_the_plugin_refuses_before_anything_is_loaded(tmp_path: Path) -> None:
    options = {"host_memory": "1MiB", "disk": {"path": str(tmp_path), "size": "1GiB"}}
    extra = {activation.OPTIONS_KEY: options}
    assert activation.is_active(config_of(additional_config=extra))
    with pytest.raises(Exception, match="disk cannot tell dummy weights from others"):
        config_of(additional_config=extra, load_format="dummy")
    named = {"weights": "zeros", **options["disk"]}  # type: ignore[dict-item]
    extra = {activation.OPTIONS_KEY: {**options, "disk": named}}
    config = config_of(additional_config=extra, load_format="dummy")
    assert activation.is_active(config)
