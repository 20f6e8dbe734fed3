# SPDX-License-Identifier: Apache-2.0
"""Tensors of checkpoints find their parameters, and nothing is left out in silence."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hybrid_models.blocks.projection import in_place
from hybrid_models.kit import part
from hybrid_models.sharding import minus_exp, sharded
from hybrid_models.tiling import tile
from hybrid_models.weights import GATE_UP, QKV, TILES, Names, load, update
from torch import nn

from tests.models.plain_kit import PlainKit, Rank, Together


def kit(rank: int = 0, ranks: int = 1) -> PlainKit:
    return PlainKit(Rank(rank, Together(ranks)), ranks, slots=1)


def test_names() -> None:
    names = Names(
        {".conv1d.weight": ".conv_weight", ".A_log": ".A"}, {**QKV, **GATE_UP}
    )

    def of(name: str) -> tuple[str, Any]:
        return names.of(name, ())

    assert of("m.0.mamba.conv1d.weight") == ("m.0.mamba.conv_weight", None)
    assert of("m.1.self_attn.k_proj.weight") == ("m.1.self_attn.qkv_proj.weight", "k")
    assert of("m.1.mlp.up_proj.weight") == ("m.1.mlp.gate_up_proj.weight", 1)
    assert of("m.1.mlp.down_proj.weight") == ("m.1.mlp.down_proj.weight", None)
    assert names.packed == {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }


def test_a_name_goes_to_the_module_that_the_layer_has() -> None:
    names = Names(stacked={"a.q_proj": ("a.in_proj", 0), **QKV})
    there = ("1.a.in_proj.weight", "2.a.qkv_proj.weight")
    assert names.of("1.a.q_proj.weight", there) == ("1.a.in_proj.weight", 0)
    assert names.of("2.a.q_proj.weight", there) == ("2.a.qkv_proj.weight", "q")
    assert names.of("3.a.q_proj.weight", there) == ("3.a.in_proj.weight", 0)


def test_linear_layers_get_each_token_in_its_row() -> None:
    given: list[list[float]] = []

    def made(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        given.append(x[:, 0].tolist())
        return x, 2 * x, 3 * x

    placed = in_place(made, 4)
    assert placed(torch.tensor([[5.0]]))[1].tolist() == [[10.0]]
    assert placed(torch.tensor([[6.0], [7.0]]))[2].tolist() == [[18.0], [21.0]]
    assert given == [[5, 0, 0, 0], [0, 6, 7, 0]]


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(2, 3)
        self.A = sharded(kit(), [2], dtype=torch.float32, of=minus_exp)


TENSORS = {
    "proj.weight": torch.ones(3, 2),
    "proj.bias": torch.zeros(3),
    "A": torch.zeros(2),
}


def test_everything_is_given_where_it_belongs() -> None:
    model = Small()
    assert load(model, TENSORS.items(), Names()) == set(TENSORS)
    assert torch.equal(model.proj.weight, torch.ones(3, 2))
    assert torch.equal(model.A, -torch.ones(2))


def test_a_repeated_head_and_frequencies_are_left_out() -> None:
    more = {"lm_head.weight": torch.ones(1), "x.rotary_emb.inv_freq": torch.ones(1)}
    assert load(Small(), (TENSORS | more).items(), Names()) == set(TENSORS)


def test_a_tensor_without_a_parameter_is_refused() -> None:
    more = {"proj.scale": torch.ones(1)}
    with pytest.raises(ValueError, match=r"no parameter for proj\.scale"):
        load(Small(), (TENSORS | more).items(), Names())


@pytest.mark.parametrize("name", TENSORS)
def test_a_parameter_without_a_tensor_is_refused(name: str) -> None:
    fewer = {key: value for key, value in TENSORS.items() if key != name}
    with pytest.raises(ValueError, match=f"nothing for {name}"):
        load(Small(), fewer.items(), Names())


@pytest.mark.parametrize("name", TENSORS)
def test_updates_come_in_parts(name: str) -> None:
    model = Small()
    load(model, TENSORS.items(), Names())
    part = {name: TENSORS[name] - 2}
    assert load(model, part.items(), Names(), is_whole=False) == {name}
    expected = minus_exp(part["A"]) if name == "A" else part[name]
    assert torch.equal(dict(model.named_parameters())[name], expected)
    with pytest.raises(ValueError, match="no parameter for other"):
        load(model, {"other": torch.ones(1)}.items(), Names(), is_whole=False)


@pytest.mark.parametrize("dummies", [False, True])
def test_the_first_weights_are_whole_unless_they_come_behind_dummies(
    dummies: bool,
) -> None:
    model: Any = Small()
    model.config, model.has_weights = SimpleNamespace(num_hidden_layers=2), dummies
    part = [("A", TENSORS["A"])]
    if not dummies:
        with pytest.raises(ValueError, match="nothing for proj"):
            update(model, part, Names())
        assert update(model, list(TENSORS.items()), Names()) == set(TENSORS)
    assert update(model, part, Names()) == {"A"}
    with pytest.raises(ValueError, match="nothing for proj"):
        update(model, iter(part), Names())  # as files are read


def test_layers_that_draft_are_left_out() -> None:
    more = {"model.layers.2.proj.weight": torch.ones(1)}
    assert load(Small(), (TENSORS | more).items(), Names(), layers=2) == set(TENSORS)
    with pytest.raises(ValueError, match=r"no parameter for model\.layers\.2"):
        load(Small(), (TENSORS | more).items(), Names(), layers=3)


def test_a_tensor_of_another_shape_is_refused() -> None:
    other = TENSORS | {"proj.weight": torch.ones(1, 2)}  # would broadcast
    with pytest.raises(ValueError, match="is no parameter of shape"):
        load(Small(), other.items(), Names())


def test_a_concatenation_is_cut_part_by_part() -> None:
    loaded = torch.arange(8.0)[:, None]  # parts of 4, 2 and 2
    for rank, expected in ((0, [0, 1, 4, 5, 6]), (1, [2, 3, 4, 5, 7])):
        found = sharded(kit(rank, 2), [4, 2, 2], (1,), whole=[False, True, False])
        found.weight_loader(found, loaded)  # type: ignore[attr-defined]
        assert found[:, 0].tolist() == expected


def test_what_ranks_cannot_share_is_refused() -> None:
    with pytest.raises(ValueError, match="tensor parallelism of 2 does not divide 3"):
        part(kit(0, 2), 3)


def test_parts_that_every_rank_has_are_repeated() -> None:
    built = []

    def build(sizes: list[int]) -> nn.Module:
        built.append(sizes)
        return nn.Linear(1, sum(sizes))

    module = tile(2, [4, 2], [False, True], build)
    assert built == [[4, 4]]
    tiled = getattr(module, TILES)
    assert tiled(0, torch.arange(6)).tolist() == [0, 1, 2, 3, 4, 5, 4, 5]
    assert tiled(1, torch.arange(6)[None]).tolist() == [[0, 1, 2, 3, 4, 5, 4, 5]]
    assert tiled(0, torch.tensor(3.0)).item() == 3.0
    assert tiled(0, torch.arange(4), 0).tolist() == [0, 1, 2, 3]
    assert tiled(0, torch.arange(2), 1).tolist() == [0, 1, 0, 1]
    with pytest.raises(ValueError, match="is packed"):
        tiled(0, torch.arange(3))
    assert not hasattr(tile(1, [4, 2], [False, True], build), TILES)
