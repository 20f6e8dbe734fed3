# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of xLSTM with one tensor for all projections of an input."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from tests.models.kinds import find
from tests.models.plain_kit import Session

FUSED = {
    "qkv_opreact.weight": ("q", "k", "v", "ogate_preact"),
    "ifgate_preact.weight": ("igate_preact", "fgate_preact"),
    "ifgate_preact.bias": ("igate_preact", "fgate_preact"),
    "proj_up_gate_z.weight": ("proj_up_gate", "proj_up"),
}
"""Of the weight mode "fused", and what they are put together of."""


def fused(
    tensors: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """The same checkpoint in that mode."""
    left = dict(tensors)
    for whole, parts in FUSED.items():
        kind = whole.rpartition(".")[2]
        end = f".{parts[0]}.{kind}"
        for name in [name for name in left if name.endswith(end)]:
            owner = name.removesuffix(end)
            pieces = [left.pop(f"{owner}.{part}.{kind}") for part in parts]
            yield f"{owner}.{whole}", torch.cat(pieces)
    yield from left.items()


def test_fused_projections_are_the_same_model(tmp_path: Path) -> None:
    kind = find("xlstm")
    checkpoint = kind.write(tmp_path)
    config, tokens = kind.config(checkpoint), {1: list(range(3, 90))}
    tensors = dict(fused(kind.tensors(checkpoint)))
    assert not any(".mlstm_layer.q." in name for name in tensors)
    sessions = [
        Session(kind.entry.load(), config, given, ranks=2)
        for given in (kind.tensors(checkpoint), tensors.items())
    ]
    one, other = (session.run(tokens)[1] for session in sessions)
    assert torch.equal(one, other)
