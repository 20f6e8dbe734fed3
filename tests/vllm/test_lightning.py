# SPDX-License-Identifier: Apache-2.0
"""Linear attention in vLLM on our kernels; vLLM's own need a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.model_executor.layers.mamba.linear.bailing_linear_attn import (
    BailingMoELinearAttention,
)
from vllm.model_executor.layers.mamba.linear.minimax_linear_attn import (
    MiniMaxText01LinearAttention,
)

from hybrid_plugin.core.commands import Pool, SaveInPass
from hybrid_plugin.device.interior import InteriorSnapshots
from hybrid_plugin.engine.kernel_choice import Mixer
from hybrid_plugin.vllm import patches
from hybrid_plugin.vllm.kernels import layers
from hybrid_plugin.vllm.kernels.layers import StateLayers
from tests.vllm.kernel_passes import SLOTS, Row, common_of, linear_builder

HEADS, DEPTH = 4, 16
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
CLASSES = (MiniMaxText01LinearAttention, BailingMoELinearAttention)


@pytest.fixture(autouse=True, scope="module")
def hooked() -> None:
    patches.patch_kernels([Mixer.LIGHTNING])


def layer_with() -> tuple[Any, StateLayers]:
    """A layer of ours whose every slot holds what nobody may read."""
    layer = SimpleNamespace(
        tp_slope=torch.tensor([0.9, 0.3, 0.1, 0.01]).view(HEADS, 1, 1),
        kv_cache=(torch.full((SLOTS, HEADS, DEPTH, DEPTH), torch.nan),),
    )
    kind = layers.Kind(Mixer.LIGHTNING, "lightning")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "kind_of", lambda _: kind)
        found = StateLayers({"0": layer}, "ours", "cpu")
    found.hang()
    return layer, found


def inputs(tokens: int, seed: int) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    qkv = torch.randn((tokens, HEADS, 3 * DEPTH), generator=rng)
    return list(torch.split(qkv, DEPTH, dim=-1))


def run(cls: Any, layer: Any, rows: Sequence[Row], qkv: list[torch.Tensor]) -> Any:
    """A pass as vLLM's layers begin it."""
    metadata = linear_builder({"0": layer}).build(0, common_of(rows))
    method = cls._prefill_and_mix_infer if metadata.num_prefills else cls._decode_infer
    states, slots = layer.kv_cache[0], metadata.state_indices_tensor
    return method(layer, *qkv, states, slots, metadata)


class Recurrence:
    """The layer token by token, as its papers define it."""

    def __init__(self, slopes: torch.Tensor) -> None:
        self._decay = torch.exp(-slopes.double())
        self.states: dict[int, torch.Tensor] = {}

    def run(self, rows: Sequence[Row], qkv: list[torch.Tensor]) -> torch.Tensor:
        tokens = iter(zip(*(x.double() for x in qkv), strict=True))
        out = []
        for row in rows:
            state = self.states.get(row.slot) if row.computed else None
            if state is None:
                state = torch.zeros((HEADS, DEPTH, DEPTH), dtype=torch.float64)
            for q, k, v in (next(tokens) for _ in range(row.length)):
                state = state * self._decay + k[:, :, None] * v[:, None, :]
                out.append((q[:, None, :] @ state).flatten())
            self.states[row.slot] = state
        return torch.stack(out)


PASSES: tuple[tuple[Row, ...], ...] = (
    (Row(3, 0, 5), Row(5, 0, 100)),
    (Row(3, 5, 1, in_prompt=False), Row(5, 100, 70), Row(1, 0, 64)),
    (Row(1, 64, 1, in_prompt=False), Row(3, 6, 1, in_prompt=False)),
    (Row(5, 170, 1), Row(1, 65, 1, in_prompt=False), Row(2, 0, 130)),
)


@pytest.mark.parametrize("cls", CLASSES)
def test_passes_equal_the_recurrence(cls: Any) -> None:
    layer, _ = layer_with()
    plain = Recurrence(layer.tp_slope)
    for seed, rows in enumerate(PASSES):
        qkv = inputs(sum(row.length for row in rows), seed)
        expected = plain.run(rows, qkv).float()
        torch.testing.assert_close(run(cls, layer, rows, qkv), expected, **CLOSE)
    for slot, state in plain.states.items():
        torch.testing.assert_close(layer.kv_cache[0][slot], state.float(), **CLOSE)
    rest = [slot for slot in range(SLOTS) if slot not in plain.states]
    assert layer.kv_cache[0][rest].isnan().all()


def test_interior_snapshots_are_what_a_pass_to_there_leaves() -> None:
    (mine, found), (paused, _) = layer_with(), layer_with()
    qkv = inputs(164, 5)
    found.interior = InteriorSnapshots(torch.device("cpu"))
    found.interior.order([SaveInPass(Pool.STATE, 2, 1, 9)])
    run(CLASSES[0], mine, [Row(2, 0, 164)], qkv)
    run(CLASSES[0], paused, [Row(2, 0, 128)], [x[:128] for x in qkv])
    kept, left = mine.kv_cache[0], paused.kv_cache[0]
    assert torch.equal(kept[9], left[2])
    assert not torch.equal(kept[9], kept[2])
    found.interior.clear()  # raises if nobody had looked the order up


def test_warming_up_touches_no_state() -> None:
    mine, found = layer_with()
    found.warm_up(3)
    assert all(states.isnan().all() for states in mine.kv_cache)
