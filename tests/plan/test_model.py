# SPDX-License-Identifier: Apache-2.0
"""From config.json to layers and bytes, by hand for published models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybrid_plugin.config import ConfigError
from hybrid_plugin.core.memory.attention_windows import (
    FULL_ATTENTION,
    ChunkedLocal,
    SlidingWindow,
)
from hybrid_plugin.tools.plan.model import load_shape, stored_weight_bytes
from tests.plan.configs import (
    CODESTRAL_MAMBA,
    FALCON_MAMBA,
    GEMMA3,
    GEMMA3N,
    LLAMA,
    NEMOTRON_H,
    QWEN3_NEXT,
    write,
)


def layers(tmp_path: Path, config: Any, **options: Any) -> list[tuple[object, int]]:
    """(window or kind, layers) of every group."""
    shape = load_shape(write(tmp_path, config), **options)
    attention = [(group.window, group.count) for group in shape.attention]
    return [*attention, *((group.kind, group.count) for group in shape.states)]


def test_gated_delta_net(tmp_path: Path) -> None:
    shape = load_shape(write(tmp_path, QWEN3_NEXT))
    assert layers(tmp_path, QWEN3_NEXT) == [
        (FULL_ATTENTION, 12),
        ("gated delta net", 36),
    ]
    assert shape.token_bytes == 12 * 2 * 2 * 256 * 2
    conv, matrix = 3 * (2 * 16 * 128 + 32 * 128) * 2, 32 * 128 * 128 * 2
    assert shape.state_bytes == 36 * (conv + matrix)
    # The published sizes are 80 and 3 billion.
    assert shape.parameters / 1e9 == pytest.approx(80, rel=0.02)
    assert shape.active_parameters / 1e9 == pytest.approx(3, rel=0.35)


def test_tensor_parallelism_divides_heads_and_keeps_at_least_one(
    tmp_path: Path,
) -> None:
    shape = load_shape(write(tmp_path, QWEN3_NEXT), ranks=4)
    assert shape.token_bytes == 12 * 2 * 1 * 256 * 2
    assert shape.states[0].state_bytes == 3 * 2048 * 2 + 8 * 128 * 128 * 2


def test_a_dense_model_has_no_states(tmp_path: Path) -> None:
    assert layers(tmp_path, LLAMA) == [(FULL_ATTENTION, 32)]
    shape = load_shape(write(tmp_path, LLAMA))
    assert (shape.token_bytes, shape.state_bytes) == (32 * 2 * 8 * 128 * 2, 0)
    assert shape.parameters / 1e9 == pytest.approx(8.03, rel=0.01)


def test_nemotron_h_by_its_letters(tmp_path: Path) -> None:
    assert layers(tmp_path, NEMOTRON_H) == [(FULL_ATTENTION, 1), ("Mamba-2", 8)]
    shape = load_shape(write(tmp_path, NEMOTRON_H))
    conv = 3 * (128 * 80 + 2 * 8 * 128) * 2
    assert shape.states[0].state_bytes == conv + 128 * 80 * 128 * 4


def test_windows(tmp_path: Path) -> None:
    groups = layers(tmp_path, GEMMA3)
    assert groups == [(FULL_ATTENTION, 10), (SlidingWindow(1024), 52)]


def test_chunks(tmp_path: Path) -> None:
    config = {**LLAMA, "attention_chunk_size": 8192}
    config["layer_types"] = ["chunked_attention"] * 3 + ["full_attention"]
    groups = layers(tmp_path, config)
    assert groups == [(ChunkedLocal(8192), 3), (FULL_ATTENTION, 1)]


def test_layers_that_share_kv_own_none(tmp_path: Path) -> None:
    groups = layers(tmp_path, GEMMA3N)
    assert groups == [(FULL_ATTENTION, 4), (SlidingWindow(512), 16)]


@pytest.mark.parametrize(
    ("fields", "kinds"),
    [
        ({"attn_layer_indices": [1, 3]}, "sasa"),
        ({"full_attn_idxs": [0]}, "asss"),
        ({"attn_type_list": [0, 0, 0, 1]}, "sssa"),
        ({"attn_layer_period": 2, "attn_layer_offset": 1}, "sasa"),
        ({"full_attention_interval": 4}, "sssa"),
        ({"layers_block_type": ["mamba", "attention"]}, "sa"),
    ],
)
def test_older_ways_to_name_layers(
    tmp_path: Path, fields: dict[str, Any], kinds: str
) -> None:
    states = {"mamba_d_state": 16, "mamba_d_conv": 4}
    config = {**LLAMA, "num_hidden_layers": 4, **states, **fields}
    assert layers(tmp_path, config) == [
        (FULL_ATTENTION, kinds.count("a")),
        ("Mamba", kinds.count("s")),
    ]


def test_number_types(tmp_path: Path) -> None:
    path = write(tmp_path, NEMOTRON_H)
    assert load_shape(path, kv_dtype="fp8").token_bytes == 2 * 8 * 128
    wide, narrow = load_shape(path), load_shape(path, state_dtype="bfloat16")
    assert wide.state_bytes - narrow.state_bytes == 8 * 128 * 80 * 128 * 2
    with pytest.raises(ConfigError, match=r"The number type 'int3' is unknown"):
        load_shape(path, kv_dtype="int3")


def test_weights_of_a_checkpoint(tmp_path: Path) -> None:
    path = write(tmp_path, LLAMA)
    assert stored_weight_bytes(path) is None
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    assert stored_weight_bytes(path) == 1000
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"metadata": {"total_size": 5000}}')
    assert stored_weight_bytes(tmp_path) == 5000


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ([], "no JSON object"),
        ({}, "does not say num_hidden_layers"),
        ({**LLAMA, "num_hidden_layers": 10**9}, "layers are too many"),
        ({**LLAMA, "num_attention_heads": "many"}, "must be a whole number"),
        ({**LLAMA, "hidden_size": 10**30}, "must be a whole number"),
        ({**LLAMA, "layer_types": ["magic"]}, "'magic' are unknown"),
        ({**LLAMA, "layer_types": ["linear_attention"]}, "of a kind that is unknown"),
        ({**LLAMA, "layer_types": 7}, "must be a list of names"),
        ({**NEMOTRON_H, "hybrid_override_pattern": "M?"}, "hybrid_override_pattern"),
        ({**NEMOTRON_H, "hybrid_override_pattern": "--"}, "no layers to cache for"),
    ],
)
def test_what_is_not_understood(tmp_path: Path, config: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load_shape(write(tmp_path, config))


def test_models_without_attention_have_states_and_nothing_else(tmp_path: Path) -> None:
    assert layers(tmp_path, CODESTRAL_MAMBA) == [("Mamba-2", 64)]
    shape = load_shape(write(tmp_path, CODESTRAL_MAMBA))
    conv = 3 * (8192 + 2 * 8 * 128) * 2
    assert shape.states[0].state_bytes == conv + 128 * 64 * 128 * 2
    assert (shape.token_bytes, shape.attention) == (0, ())
    # The published sizes; nothing feeds forward beside the mixers.
    assert shape.parameters / 1e9 == pytest.approx(7.29, rel=0.01)
    assert layers(tmp_path, FALCON_MAMBA) == [("Mamba", 64)]
    falcon = load_shape(write(tmp_path, FALCON_MAMBA))
    assert falcon.states[0].state_bytes == (3 * 8192 + 8192 * 16) * 2
    assert falcon.parameters / 1e9 == pytest.approx(7.27, rel=0.05)
