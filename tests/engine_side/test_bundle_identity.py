# SPDX-License-Identifier: Apache-2.0
"""What tells the bundles of one model from those of another."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from hybrid_plugin.config import ConfigError, DiskOptions
from hybrid_plugin.core.memory.attention_windows import (
    FULL_ATTENTION,
    ChunkedLocal,
    SlidingWindow,
)
from hybrid_plugin.engine.bundle_identity import (
    AdapterNames,
    ModelFiles,
    attention_layer,
    in_order,
    layer_labels,
    model_digest,
    state_layer,
    weights_name,
)

DISK = DiskOptions("/var/cache/hybrid", 1 << 30)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's, with weights of a few bytes."""
    config = {"hidden_size": 64, "transformers_version": "5.0", "rope_theta": 1e4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return tmp_path


def change(folder: Path, **entries: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


def test_weights_are_told_by_their_files(folder: Path) -> None:
    files = ModelFiles.find(str(folder))
    before = weights_name(DISK, files, "auto")
    assert before == weights_name(DISK, files, "safetensors")
    (folder / "model.safetensors").write_bytes(b"other weights")
    assert before != weights_name(DISK, files, "auto")


def test_a_name_for_weights_is_no_digest(folder: Path) -> None:
    files = ModelFiles.find(str(folder))
    digest = weights_name(DISK, files, "auto")
    assert weights_name(DiskOptions("/a", 1, digest), files, "auto") != digest


def test_dummy_weights_need_a_name(folder: Path) -> None:
    files = ModelFiles.find(str(folder))
    with pytest.raises(ConfigError, match="cannot tell dummy weights from others"):
        weights_name(DISK, files, "dummy")
    named = DiskOptions("/a", 1, "zeros")
    assert weights_name(named, files, "dummy") == "name zeros"


def test_a_folder_without_weights_needs_a_name(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"no weights in .*disk\.weights"):
        weights_name(DISK, ModelFiles.find(str(folder)), "auto")


def test_a_model_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"disk needs the config.json of nobody/none"):
        ModelFiles.find("nobody/none")
    with pytest.raises(ConfigError, match="give the model as a folder"):
        ModelFiles.find(str(tmp_path))


@pytest.mark.parametrize("text", ["{", "[]", "3"])
def test_a_configuration_that_is_none_is_refused(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(ConfigError, match="disk cannot read the"):
        ModelFiles.find(str(folder)).configuration()


def test_a_model_in_the_hubs_cache(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def cached(name: str, file: str, revision: str | None) -> str:
        asked.append((name, file, revision))
        return str(folder / file)

    room = "hybrid_plugin.engine.bundle_identity.try_to_load_from_cache"
    monkeypatch.setattr(room, cached)
    assert ModelFiles.find("some/model", "main").folder == folder
    assert asked == [("some/model", "config.json", "main")]


def test_whatever_changes_the_model_changes_its_digest(folder: Path) -> None:
    files = ModelFiles.find(str(folder))
    plain = model_digest(files, {}, "bfloat16", None)
    change(folder, transformers_version="6.0")
    assert model_digest(files, {}, "bfloat16", None) == plain
    others = {
        model_digest(files, {"rope_theta": 1e6}, "bfloat16", None),
        model_digest(files, {}, "float32", None),
        model_digest(files, {}, "bfloat16", "fp8"),
    }
    change(folder, rope_theta=1e6)
    others.add(model_digest(files, {}, "bfloat16", None))
    assert plain not in others and len(others) == 4


def test_layers_are_called_by_their_numbers() -> None:
    assert layer_labels(
        [
            "model.layers.3.self_attn.attn",
            "language_model.model.layers.11.linear_attn",
            "model.layers.4.mamba2",
        ]
    ) == {
        "model.layers.3.self_attn.attn": "3",
        "language_model.model.layers.11.linear_attn": "11",
        "model.layers.4.mamba2": "4",
    }


def test_layers_whose_numbers_are_not_plain_keep_their_names() -> None:
    same = ["model.layers.0.self_attn", "mtp.layers.0.self_attn"]
    several = ["blocks.1.attn.2", "shared.attn"]
    assert layer_labels([*same, *several]) == {n: n for n in (*same, *several)}


def test_layers_say_how_far_back_they_see() -> None:
    assert attention_layer("3", FULL_ATTENTION) == "3 full attention"
    entries = {
        attention_layer("3", FULL_ATTENTION, latent=True),
        attention_layer("3", SlidingWindow(64)),
        attention_layer("3", SlidingWindow(128)),
        attention_layer("3", ChunkedLocal(64)),
        state_layer("3"),
        "3 full attention",
    }
    assert len(entries) == 6
    assert in_order(sorted(entries, reverse=True)) == in_order(entries)


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """The folder of an adapter."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"adapter")
    (folder / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 16}')
    return folder


def test_adapters_are_named_after_their_weights(adapter: Path, tmp_path: Path) -> None:
    names = AdapterNames()
    other = tmp_path / "other"
    shutil.copytree(adapter, other)
    (other / "adapter_model.safetensors").write_bytes(b"of another one")
    found = {names.of(str(adapter)), names.of(str(other))}
    assert len(found) == 2 and None not in found
    assert names.of(str(tmp_path / "none")) is None
    assert names.of("some/adapter") is None


def test_adapters_are_named_after_how_their_weights_are_used(adapter: Path) -> None:
    """Engines scale them as `adapter_config.json` says."""
    before = AdapterNames().of(str(adapter))
    assert AdapterNames().of(str(adapter)) == before
    (adapter / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 64}')
    assert AdapterNames().of(str(adapter)) not in (before, None)
    (adapter / "adapter_config.json").unlink()
    assert AdapterNames().of(str(adapter)) is None


def test_an_adapter_that_is_loaded_again_is_looked_at_again(adapter: Path) -> None:
    names = AdapterNames()
    before = names.of(str(adapter), 1)
    (adapter / "adapter_model.safetensors").write_bytes(b"trained on")
    assert names.of(str(adapter), 1) == before != names.of(str(adapter), 2)
