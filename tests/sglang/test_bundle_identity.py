# SPDX-License-Identifier: Apache-2.0
"""What SGLang's models are called on disk."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, HybridReqToTokenPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import get_context, get_parallel

from hybrid_plugin.config import ConfigError, DiskOptions
from hybrid_plugin.core.commands import Pool
from hybrid_plugin.core.memory.attention_windows import SlidingWindow
from hybrid_plugin.sglang import bundle_identity
from hybrid_plugin.sglang.bundle_identity import KeptLayers, identity_of, kept_layers
from tests.engines.drivers.driver import MODEL

PAGE = 16
DISK = DiskOptions("/var/cache/hybrid", 1 << 30)


@pytest.fixture(autouse=True)
def configured() -> Iterator[None]:
    with (
        get_context().override_server_args(),
        get_parallel().override(tp_rank=0, tp_size=1, attn_tp_size=1),
    ):
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The bundled model, to be changed."""
    shutil.copytree(MODEL, tmp_path / "model")
    return tmp_path / "model"


def pools(model: Any, dtype: torch.dtype = torch.bfloat16) -> tuple[Any, Any]:
    """SGLang's, of that model."""
    config = mambaish_config(model)
    params = config.mamba2_cache_params
    slots = HybridReqToTokenPool(
        size=4,
        mamba_size=3,
        mamba_spec_state_size=4,
        max_context_len=64,
        device="cpu",
        enable_memory_saver=False,
        cache_params=params,
        mamba_layer_ids=params.layers,
        enable_mamba_extra_buffer=False,
    ).mamba_pool
    return kv_pool(slots, config.full_attention_layer_ids, dtype), slots


def kv_pool(slots: Any, layers: list[int], dtype: torch.dtype = torch.bfloat16) -> Any:
    return HybridLinearKVPool(
        size=64,
        dtype=dtype,
        page_size=PAGE,
        head_num=2,
        head_dim=8,
        full_attention_layer_ids=layers,
        device="cpu",
        mamba_pool=slots,
    )


def arguments(folder: Path, **more: Any) -> Any:
    """As much of SGLang's `ServerArgs` as names need."""
    defaults: dict[str, Any] = {
        "model_path": str(folder),
        "revision": None,
        "load_format": "auto",
        "speculative_draft_model_path": None,
        "speculative_draft_model_revision": None,
        "speculative_draft_load_format": None,
    }
    return SimpleNamespace(**{**defaults, **more})


def kept(model: Any, drafts: tuple[Any, ...] = ()) -> KeptLayers:
    pages, slots = pools(model)
    return kept_layers(model, pages, slots, PAGE, drafts=drafts)


def test_layers_are_called_as_in_other_engines(folder: Path) -> None:
    found = kept(ModelConfig(str(folder)))
    assert found.layers == tuple(
        sorted(
            [f"{n} state" for n in (0, 1, 2, 4, 5, 6)]
            + [f"{n} full attention" for n in (3, 7)]
        )
    )
    assert found.kv_dtype == "bfloat16"
    assert {pool: [one.name for one in rows] for pool, rows in names(found)} == {
        Pool.KV: ["3.key", "7.key", "3.value", "7.value"],
        Pool.STATE: [f"{n}.{p}" for p in ("conv", "state") for n in (0, 1, 2, 4, 5, 6)],
    }


def names(found: KeptLayers) -> list[tuple[str, Any]]:
    return list(found.named.items())


def test_windows_are_layers_of_their_own(folder: Path) -> None:
    pool = SWAKVPool(
        size=64,
        size_swa=32,
        page_size=PAGE,
        dtype=torch.bfloat16,
        head_num=2,
        head_dim=8,
        swa_attention_layer_ids=[0, 2],
        full_attention_layer_ids=[1],
        device="cpu",
    )
    model = ModelConfig(str(folder))
    found = kept_layers(model, pool, None, PAGE, SlidingWindow(64))
    assert found.layers == (
        "0 a sliding window of 64",
        "1 full attention",
        "2 a sliding window of 64",
    )
    assert list(found.named) == [Pool.KV, Pool.window(0)]


def test_a_draft_model_in_the_pages_is_part_of_the_name(folder: Path) -> None:
    model = ModelConfig(str(folder))
    pages, slots = pools(model)
    draft = kv_pool(slots, [0]).full_kv_pool
    found = kept_layers(model, pages, slots, PAGE, drafts=[draft])
    assert "draft 0.0 full attention" in found.layers
    assert [one.name for one in found.named[Pool.KV]][-2:] == [  # type: ignore[union-attr]
        "draft 0.0.key",
        "draft 0.0.value",
    ]
    beside = folder.parent / "draft"
    shutil.copytree(folder, beside)
    named = arguments(folder, speculative_draft_model_path=str(beside))
    one = identity_of(model, named, DISK, found)
    (beside / "more.safetensors").write_bytes(b"other weights")
    other = identity_of(model, named, DISK, found)
    assert one.weights != other.weights
    assert one != identity_of(model, named, DISK, kept(model))


def test_ranks_have_one_name_and_a_part_each(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ModelConfig(str(folder))
    layers, found = kept(model), []
    alone = identity_of(model, arguments(folder), DISK, layers)
    for rank in range(2):
        place = SimpleNamespace(tp_rank=rank, tp_size=2)
        monkeypatch.setattr(bundle_identity, "get_parallel", lambda place=place: place)
        found.append(identity_of(model, arguments(folder), DISK, layers))
    assert found[0].fingerprint() == found[1].fingerprint()
    assert [one.rank_name for one in found] == ["rank-0-of-2", "rank-1-of-2"]
    assert alone.fingerprint() != found[0].fingerprint()


def test_whatever_changes_the_meaning_changes_the_name(folder: Path) -> None:
    def identity(model: Any, **more: Any) -> str:
        return identity_of(
            model, arguments(folder, **more), DISK, kept(model)
        ).fingerprint()

    plain = identity(ModelConfig(str(folder)))
    assert plain == identity(ModelConfig(str(folder)))
    override = json.dumps({"rope_theta": 123.0})
    others = {
        identity(ModelConfig(str(folder), dtype="float32")),
        identity(ModelConfig(str(folder), model_override_args=override)),
    }
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 5.0}))
    others.add(identity(ModelConfig(str(folder))))
    assert plain not in others and len(others) == 3


def test_made_up_weights_are_refused(folder: Path) -> None:
    model = ModelConfig(str(folder))
    with pytest.raises(ConfigError, match="cannot tell dummy weights from others"):
        identity_of(model, arguments(folder, load_format="dummy"), DISK, kept(model))


def test_quantised_kv_is_sglangs_own(folder: Path) -> None:
    model = ModelConfig(str(folder))
    pages, slots = pools(model, torch.float8_e4m3fn)
    found = kept_layers(model, pages, slots, PAGE)
    assert found.kv_dtype == "float8_e4m3fn as SGLang scales it"
