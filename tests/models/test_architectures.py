# SPDX-License-Identifier: Apache-2.0
"""Every architecture against its reference, mostly transformers, without an engine.

Prompts come in parts, single tokens of other sequences beside them, and ranks cut the
weights.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from hybrid_models.catalogue import CATALOGUE, Entry

from tests.models.kinds import KINDS, Kind
from tests.models.plain_kit import Session

EXACT = 2e-4
"""How far logits in float32 may lie apart, of logits between -10 and 10."""


def session(kind: Kind, checkpoint: Path, ranks: int = 1) -> Session:
    return Session(
        kind.entry.load(),
        kind.config(checkpoint),
        kind.tensors(checkpoint),
        ranks=ranks,
    )


def prompt(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 250) for _ in range(count)]


def test_every_entry_has_a_kind_and_the_other_way_round() -> None:
    assert {kind.entry.name for kind in KINDS} == {entry.name for entry in CATALOGUE}


@pytest.mark.parametrize("entry", CATALOGUE, ids=lambda entry: entry.name)
def test_a_configuration_of_its_own_is_declared(entry: Entry) -> None:
    own = entry.load().CONFIG
    assert (own is not None) == entry.own_config
    assert own is None or own.model_type == entry.model_type


def test_logits_are_those_of_the_reference(kind: Kind, checkpoint: Path) -> None:
    tokens = prompt(0, 300)
    found = session(kind, checkpoint).run({1: tokens})[1]
    expected = kind.reference(checkpoint)(tokens)
    assert (found - expected).abs().max() < EXACT
    assert expected.std() > 0.1


def test_parts_and_neighbours_change_nothing(kind: Kind, checkpoint: Path) -> None:
    model = session(kind, checkpoint)
    first, second = prompt(1, 230), prompt(2, 200)
    logits: dict[int, list[torch.Tensor]] = {1: [], 2: []}

    def run(**parts: list[int]) -> None:
        by_slot = {int(slot[1:]): tokens for slot, tokens in parts.items()}
        for slot, found in model.run(by_slot).items():
            logits[slot].append(found)

    run(_1=first[:70])
    run(_1=first[70:99], _2=second[:64])
    run(_1=first[99:100], _2=second[64:150])
    run(_2=second[150:151], _1=first[100:228])
    run(_1=first[228:229], _2=second[151:152])
    run(_1=first[229:230], _2=second[152:200])
    for slot, tokens in ((1, first), (2, second)):
        found, expected = torch.cat(logits[slot]), kind.reference(checkpoint)(tokens)
        assert (found - expected).abs().max() < EXACT


def test_states_matter_and_can_be_resumed(kind: Kind, checkpoint: Path) -> None:
    model, tokens = session(kind, checkpoint), prompt(3, 200)
    model.run({1: tokens[:150]})
    model.fork(1, 2)
    resumed = model.run({1: tokens[150:]})[1]
    again = model.run({2: tokens[150:]})[2]
    assert torch.equal(resumed, again)
    model.run({3: tokens[:150]})
    for rank in model._ranks:
        for pools in rank.pools.values():
            for pool in pools:
                pool[3] = 0
    forgotten = model.run({3: tokens[150:]})[3]
    row = 0 if kind.is_short else -1
    assert (forgotten[row] - resumed[row]).abs().max() > 100 * EXACT


def test_two_ranks_compute_the_same(kind: Kind, checkpoint: Path) -> None:
    tokens = prompt(4, 200)
    model = session(kind, checkpoint, ranks=2)
    found = torch.cat(
        [model.run({1: tokens[:150]})[1], model.run({1: tokens[150:]})[1]]
    )
    expected = kind.reference(checkpoint)(tokens)
    assert (found - expected).abs().max() < EXACT


def test_states_alone_are_declared(kind: Kind, checkpoint: Path) -> None:
    layers = kind.entry.load().attention_layers(kind.config(checkpoint))
    assert kind.entry.has_states_alone == (not layers)


def test_the_number_of_state_tensors_is_as_declared(
    kind: Kind, checkpoint: Path
) -> None:
    from hybrid_models.kit import Placed

    architecture, f32 = kind.entry.load(), torch.float32
    placed = Placed(1, f32, f32, f32)
    tensors = architecture.state_tensors(kind.config(checkpoint), placed)
    assert len(tensors) == architecture.STATES
