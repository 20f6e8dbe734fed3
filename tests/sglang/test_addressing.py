# SPDX-License-Identifier: Apache-2.0
"""Convolution states beyond 32-bit offsets go to the kernels that reach them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang.kernels.ops.mamba import causal_conv1d_triton
from sglang.srt.layers.attention.mamba import causal_conv1d

from hybrid_plugin.sglang import addressing, patches

CHANNELS, WIDTH = 8, 4
STRIDE = 66 << 20
"""Elements between two slots of Falcon-H1-34B, about: 133 MiB of bfloat16."""


def states(slots: int) -> torch.Tensor:
    """`[slots, channels, width - 1]`, slot-major, without memory."""
    shape = (slots, CHANNELS, WIDTH - 1)
    return torch.empty_strided(shape, (STRIDE, WIDTH - 1, 1), device="meta")


def test_the_measure_is_the_furthest_element() -> None:
    assert not addressing.is_beyond(states(32))
    assert addressing.is_beyond(states(34))
    assert not addressing.is_beyond(torch.empty(100 << 20, 4, device="meta"))
    assert addressing.is_beyond(torch.empty(1 << 29, 5, device="meta"))
    assert not addressing.is_beyond(torch.empty(8, 8, device="meta").expand(8, 8))


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What SGLang's functions call, on a module as it is where there is CUDA."""
    seen: list[str] = []
    wanted: dict[str, Any] = {}

    def kernel(name: str, value: float) -> Any:
        def run(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            seen.append(name)
            if name.startswith("triton"):
                return torch.full_like(x, value)
            x.fill_(value)
            return x

        return run

    for name in ("causal_conv1d_fwd", "causal_conv1d_update_kernel"):
        cuda = kernel(name, 1.0)
        monkeypatch.setattr(causal_conv1d, name, cuda, raising=False)
    for name in ("causal_conv1d_fn", "causal_conv1d_update"):
        triton = kernel(f"triton {name}", 2.0)
        monkeypatch.setattr(causal_conv1d_triton, name, triton)
    monkeypatch.setattr(causal_conv1d, "_HAS_CONV1D_KERNEL", True)

    def hook(target: str, kind: str, function: Any) -> None:
        name = target.rpartition(".")[2]
        original = getattr(causal_conv1d, name)
        wanted[name] = kind
        monkeypatch.setattr(
            causal_conv1d, name, lambda *a, **kw: function(original, *a, **kw)
        )

    monkeypatch.setattr(patches, "_hook", hook)
    patches._convolve_beyond_32_bits()
    assert set(wanted.values()) == {"AROUND"} and len(wanted) == 2
    return seen


@pytest.mark.parametrize(("slots", "value"), [(32, 1.0), (64, 2.0)])
def test_a_step_takes_the_kernel_that_reaches_its_slots(
    called: list[str], slots: int, value: float
) -> None:
    x = torch.zeros(3, CHANNELS)
    weight = torch.zeros(CHANNELS, WIDTH)
    indices = torch.tensor([1, 2, slots - 1], dtype=torch.int32)
    out = causal_conv1d.causal_conv1d_update(
        x, states(slots), weight, None, "silu", conv_state_indices=indices
    )
    assert out.shape == x.shape and bool((out == value).all())
    expected = (
        "causal_conv1d_update_kernel" if value == 1 else "triton causal_conv1d_update"
    )
    assert called == [expected]


@pytest.mark.parametrize(("slots", "value"), [(32, 1.0), (64, 2.0)])
def test_a_prefill_does_too(called: list[str], slots: int, value: float) -> None:
    x = torch.zeros(CHANNELS, 12)
    out = causal_conv1d.causal_conv1d_fn(
        x,
        torch.zeros(CHANNELS, WIDTH),
        None,
        query_start_loc=torch.tensor([0, 5, 12], dtype=torch.int32),
        cache_indices=torch.tensor([1, slots - 1], dtype=torch.int32),
        conv_states=states(slots),
    )
    assert out.shape == x.shape and bool((out == value).all())
    expected = "causal_conv1d_fwd" if value == 1 else "triton causal_conv1d_fn"
    assert called == [expected]


def test_states_that_no_kernel_reaches_are_an_error(called: list[str]) -> None:
    with pytest.raises(RuntimeError, match="beyond 2\\*\\*31 elements"):
        causal_conv1d.causal_conv1d_fn(
            torch.zeros(2, CHANNELS, 12),
            torch.zeros(CHANNELS, WIDTH),
            conv_states=states(64),
        )
    assert called == []


class FalconH1Config:
    """Stands for SGLang's, whose kernels were looked at."""


class Lfm2Config:
    """Stands for SGLang's, whose kernels multiply in 32 bits."""


PARAMS = SimpleNamespace(
    dtype=SimpleNamespace(conv=torch.bfloat16, temporal=torch.float32)
)


def reach(config: Any, monkeypatch: pytest.MonkeyPatch, *, delta: bool = False) -> Any:
    found = config if delta else None
    monkeypatch.setattr(addressing, "hybrid_gdn_config", lambda _: found)
    monkeypatch.setattr(addressing, "hybrid_kda_config", lambda _: None)
    return addressing.addressable_bytes(SimpleNamespace(hf_config=config), PARAMS)


def test_kernels_that_are_not_known_reach_2_31_elements(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert reach(Lfm2Config(), monkeypatch) == 4 << 30
    assert reach(FalconH1Config(), monkeypatch) is None
    assert reach(Lfm2Config(), monkeypatch, delta=True) is None
