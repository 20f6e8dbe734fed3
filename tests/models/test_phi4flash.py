# SPDX-License-Identifier: Apache-2.0
"""What engines find in a configuration of Phi-4-mini-flash, and pairs of heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hybrid_models.architectures.phi4flash import Config, Phi4Flash, attention_shape
from hybrid_models.blocks.differential_attention import DifferentialShape, halved
from hybrid_models.kit import Placed

PUBLISHED: dict[str, Any] = {
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "max_position_embeddings": 262144,
    "num_attention_heads": 40,
    "num_hidden_layers": 32,
    "num_key_value_heads": 20,
    "sliding_window": 512,
    "vocab_size": 200064,
}
"""Of microsoft/Phi-4-mini-flash-reasoning, as far as it says what layers are."""


def test_the_first_half_and_two_layers_keep_something() -> None:
    config = Config(**PUBLISHED)
    assert list(Phi4Flash.state_layers(config)) == list(range(0, 17, 2))
    assert list(Phi4Flash.attention_layers(config)) == list(range(1, 18, 2))
    f32 = torch.float32
    conv, state = Phi4Flash.state_tensors(config, Placed(1, f32, f32, f32))
    assert (conv.shape, state.shape) == ((5120, 3), (5120, 16))
    assert config.mamba_dt_rank == 160


def test_windows_are_those_of_the_first_half() -> None:
    config = Config(**PUBLISHED)
    kinds = config.layers_block_type
    windows = [attention_shape(config, kind).window for kind in kinds[1::2]]
    assert windows == [512] * 8 + [None] * 8
    assert config.sliding_window is None, "engines would take it for every layer's"


def test_a_pair_of_heads_is_one_in_caches() -> None:
    config = Config(**PUBLISHED)
    assert (config.num_key_value_heads, config.head_dim) == (10, 128)
    shape = attention_shape(config, "full")
    assert (shape.heads, shape.kv_heads, shape.head) == (40, 20, 64)


def test_a_configuration_that_was_written_is_read_as_it_was(tmp_path: Path) -> None:
    config = Config(**PUBLISHED)
    config.save_pretrained(tmp_path)
    for again in (Config(**config.to_dict()), Config.from_pretrained(tmp_path)):
        for name in ("num_key_value_heads", "head_dim", "attention_window_size"):
            assert getattr(again, name) == getattr(config, name)
        assert again.layers_block_type == config.layers_block_type


@pytest.mark.parametrize("other", [{"num_hidden_layers": 30}, {"mb_per_layer": 4}])
def test_layers_in_another_order_are_refused(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="every second one a Mamba layer"):
        Config(**PUBLISHED | other)


@pytest.mark.parametrize("heads", [(3, 2), (4, 1)])
def test_heads_that_cannot_be_paired_are_refused(heads: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="cannot all be paired"):
        DifferentialShape(128, *heads, 16)


def test_each_query_meets_its_own_half_of_the_keys() -> None:
    q, k = torch.randn(5, 4 * 8), torch.randn(5, 4 * 8)
    wide = halved(q, 8).view(5, 4, 16)
    pairs = k.view(5, 2, 16).repeat_interleave(2, dim=1)
    expected = (q * k).view(5, 4, 8).sum(-1)
    torch.testing.assert_close((wide * pairs).sum(-1), expected)
