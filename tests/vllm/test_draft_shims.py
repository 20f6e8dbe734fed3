# SPDX-License-Identifier: Apache-2.0
"""What vLLM's CPU build gets wrong about drafts, and what we put in its place."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from vllm.model_executor.layers.mamba import mamba_mixer2
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention, mamba_ssm
from vllm.platforms import current_platform

from hybrid_plugin.vllm.speculation import patches, rolling_window
from hybrid_plugin.vllm.wrapping import WRAPPED
from tests.vllm.test_gated_delta_net import CHANNELS, TAPS, layer_with

pytestmark = pytest.mark.skipif(
    not current_platform.is_cpu(), reason="these are faults of the CPU build"
)

DRAFTS = 3
SLOTS = 12


@pytest.fixture(autouse=True, scope="module")
def patched() -> None:
    config: Any = SimpleNamespace(use_v2_model_runner=False)
    patches.apply(config)


def ints(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def starts_of(lengths: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).to(torch.int32)


# ------------------------------------------------------------- the convolution

steps = st.lists(
    st.tuples(st.integers(1, 1 + DRAFTS), st.integers(0, DRAFTS)),
    min_size=1,
    max_size=6,
)
"""Of one row: tokens in a pass, and how many drafts of it are accepted at most."""


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(steps, min_size=1, max_size=3), seed=st.integers(0, 1000))
def test_rolling_windows_equal_one_long_convolution(
    rows: list[list[tuple[int, int]]], seed: int
) -> None:
    """Whatever was proposed and rejected, outputs are those of what was accepted."""
    channels, taps = 2, 4
    rng = torch.Generator().manual_seed(seed)
    weight = torch.randn((channels, taps), generator=rng)
    bias = torch.randn(channels, generator=rng)
    windows = torch.randn((SLOTS, channels, taps - 1 + DRAFTS), generator=rng)
    history = [windows[1 + row, :, : taps - 1].clone() for row in range(len(rows))]
    accepted = [1] * len(rows)
    for index in range(max(map(len, rows))):
        live = [row for row, plan in enumerate(rows) if index < len(plan)]
        lengths = [rows[row][index][0] for row in live]
        x = torch.randn((sum(lengths), channels), generator=rng)
        found = rolling_window.convolve(
            x,
            windows,
            weight,
            bias,
            ints(*[1 + row for row in live]),
            ints(*[accepted[row] for row in live]),
            starts_of(lengths),
            activation="silu",
        )
        for row, tokens, result in zip(
            live, x.split(lengths), found.split(lengths), strict=True
        ):
            line = torch.cat([history[row], tokens.T], dim=1)
            wanted = functional.conv1d(
                line[None], weight[:, None], bias, groups=channels
            )[0, :, -len(tokens) :]
            torch.testing.assert_close(result.T, functional.silu(wanted))
            drafts = min(rows[row][index][1], len(tokens) - 1)
            accepted[row] = 1 + drafts
            history[row] = torch.cat([history[row], tokens[: 1 + drafts].T], dim=1)


def test_padding_is_left_alone() -> None:
    windows = torch.ones((SLOTS, 2, TAPS - 1))
    out = rolling_window.convolve(
        torch.ones((2, 2)),
        windows,
        torch.ones((2, TAPS)),
        None,
        ints(0, 4),
        ints(1, 1),
        ints(0, 1, 2),
        activation=None,
    )
    assert out.tolist() == [[0.0, 0.0], [4.0, 4.0]]
    assert (windows == 1).all()


# ------------------------------------------------------------ gated delta net


def gdn_pass(
    forward: Any,
    layer: Any,
    slots: Sequence[Sequence[int]],
    accepted: Sequence[int],
    inputs: Sequence[tuple[torch.Tensor, ...]],
) -> torch.Tensor:
    """Verify rows of tokens; `inputs` has (mixed, a, b) of each row."""
    windows = layer.kv_cache[0].transpose(-1, -2)
    mixed, a, b = (torch.cat(parts) for parts in zip(*inputs, strict=True))
    metadata = SimpleNamespace(
        num_spec_decodes=len(slots),
        spec_state_indices_tensor=ints(*slots),
        spec_query_start_loc=starts_of([len(row[0]) for row in inputs]),
        num_accepted_tokens=ints(*accepted),
    )
    states = gdn_attention._ssm_state_view(layer)
    out: torch.Tensor = forward(
        layer, metadata, mixed, b, a, windows, states, TAPS, windows.shape[-1]
    )
    return out


def gdn_layer(drafts: int) -> Any:
    """A layer with room for so many drafts, and states drawn by slot."""
    layer = layer_with()
    _, states = layer.kv_cache
    rng = torch.Generator().manual_seed(7)
    inputs = torch.randn((SLOTS, TAPS - 1 + DRAFTS, CHANNELS), generator=rng)
    layer.kv_cache = (
        inputs.to(torch.bfloat16)[:, : TAPS - 1 + drafts].clone(),
        torch.randn(states.shape, generator=rng),
    )
    return layer


def gdn_inputs(tokens: int, seed: int) -> tuple[torch.Tensor, ...]:
    rng = torch.Generator().manual_seed(seed)
    sizes = (CHANNELS, 4, 4)
    return tuple(
        torch.randn((tokens, size), generator=rng).to(torch.bfloat16) for size in sizes
    )


def stock(patched: Any) -> Any:
    """vLLM's own function behind a patch."""
    return getattr(patched, WRAPPED)


def test_ragged_rows_equal_rows_alone() -> None:
    """A row alone, in a layer for no more drafts than it has, is right in vLLM."""
    lengths, accepted = [1, 3, 4], [2, 1, 1]
    slots = [[1, 2, 0, 0], [3, 4, 5, 0], [6, 7, 8, 9]]
    inputs = [gdn_inputs(length, seed) for seed, length in enumerate(lengths)]
    together = gdn_layer(DRAFTS)
    found = gdn_pass(gdn_attention._spec_forward, together, slots, accepted, inputs)
    for row, out in enumerate(found.split(lengths)):
        alone = gdn_layer(lengths[row] - 1)
        first, window = slots[row][0], accepted[row] - 1
        whole = gdn_layer(DRAFTS)
        alone.kv_cache[0][first, : TAPS - 1] = whole.kv_cache[0][
            first, window : window + TAPS - 1
        ]
        alone.kv_cache[1][first] = whole.kv_cache[1][slots[row][window]]
        wanted = gdn_pass(
            stock(gdn_attention._spec_forward),
            alone,
            [slots[row][: lengths[row]]],
            [1],
            [inputs[row]],
        )
        torch.testing.assert_close(out, wanted, rtol=0.02, atol=0.02)
        columns = slots[row][: lengths[row]]
        torch.testing.assert_close(
            together.kv_cache[1][columns],
            alone.kv_cache[1][columns],
            rtol=0.02,
            atol=0.02,
        )
        kept = TAPS - 2 + lengths[row]
        assert torch.equal(
            together.kv_cache[0][first, :kept], alone.kv_cache[0][first, :kept]
        )


def test_full_rows_are_vllms_own() -> None:
    inputs = [gdn_inputs(1 + DRAFTS, 0)]
    ours, theirs = gdn_layer(DRAFTS), gdn_layer(DRAFTS)
    row = [[1, 2, 3, 4]]
    found = gdn_pass(gdn_attention._spec_forward, ours, row, [3], inputs)
    wanted = gdn_pass(stock(gdn_attention._spec_forward), theirs, row, [3], inputs)
    assert torch.equal(found, wanted)
    assert all(map(torch.equal, ours.kv_cache, theirs.kv_cache))


def test_vllm_fails_for_a_short_row_behind_accepted_drafts() -> None:
    """The whole of it: one row, of one token, of whose last step a draft counted."""
    with pytest.raises(RuntimeError):
        gdn_pass(
            stock(gdn_attention._spec_forward),
            gdn_layer(DRAFTS),
            [[1, 2, 3, 4]],
            [2],
            [gdn_inputs(1, 0)],
        )


def test_vllm_keeps_rejected_inputs_behind_a_short_row() -> None:
    """The same with nothing accepted: it runs, and the next window is wrong."""
    layer = gdn_layer(DRAFTS)
    before = layer.kv_cache[0][1].clone()
    (mixed, _, _), *_ = inputs = [gdn_inputs(1, 0)]
    gdn_pass(stock(gdn_attention._spec_forward), layer, [[1, 2, 3, 4]], [1], inputs)
    window = layer.kv_cache[0][1, : TAPS - 1]
    wanted = torch.cat([before[1 : TAPS - 1], mixed])
    assert not torch.equal(window, wanted)
    assert torch.equal(window, before[1:TAPS]), "it lacks the token it just took"


def plain_pass(forward: Any, layer: Any, slots: torch.Tensor) -> torch.Tensor:
    """One row of one token, without drafts, in a layer with room for them."""
    mixed, a, b = gdn_inputs(1, 0)
    windows, states = layer.kv_cache[0].transpose(-1, -2), layer.kv_cache[1]
    out = torch.zeros((1, *states.shape[1:3]), dtype=torch.bfloat16)
    metadata = SimpleNamespace(
        non_spec_state_indices_tensor=slots,
        non_spec_query_start_loc=ints(0, 1),
        num_decodes=1,
        num_decode_tokens=1,
        num_prefills=0,
        num_prefill_tokens=0,
    )
    view = gdn_attention._ssm_state_view(layer)
    forward(layer, metadata, mixed, b, a, out, windows, view, TAPS)
    return out


def test_a_single_row_may_lie_in_a_table() -> None:
    """As where a hit leaves one token of a prompt, and nothing was drafted yet."""
    table = ints([2, 3, 4, 5])
    found = plain_pass(gdn_attention._spec_aware_nonspec, gdn_layer(3), table[:, 0])
    wanted = plain_pass(stock(gdn_attention._spec_aware_nonspec), gdn_layer(3), ints(2))
    assert torch.equal(found, wanted)
    assert found.any()


def test_vllm_fails_for_a_single_row_in_a_table() -> None:
    table = ints([2, 3, 4, 5])
    with pytest.raises(RuntimeError, match="contiguous at last dimension"):
        plain_pass(stock(gdn_attention._spec_aware_nonspec), gdn_layer(3), table[:, 0])


# -------------------------------------------------------------------- Mamba-2

HEADS, WIDTH, DEPTH, GROUPS = 4, 64, 64, 2


def mamba2_operands(tokens: int) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(tokens)
    return {
        "x": torch.randn((tokens, HEADS, WIDTH), generator=rng),
        "dt": torch.randn((tokens, HEADS), generator=rng),
        "B": torch.randn((tokens, GROUPS, DEPTH), generator=rng),
        "C": torch.randn((tokens, GROUPS, DEPTH), generator=rng),
    }


RATES = -torch.rand(HEADS, generator=torch.Generator().manual_seed(1))
SKIP = torch.rand(HEADS, generator=torch.Generator().manual_seed(2))
BIAS = torch.randn(HEADS, generator=torch.Generator().manual_seed(3))


def mamba2_update(
    update: Any, states: torch.Tensor, given: dict[str, torch.Tensor], **table: Any
) -> torch.Tensor:
    """As the layer calls it."""
    out = torch.full_like(given["x"], torch.nan)
    update(
        states,
        given["x"],
        given["dt"][:, :, None].expand(-1, -1, WIDTH),
        RATES[:, None, None].expand(-1, WIDTH, DEPTH),
        given["B"],
        given["C"],
        SKIP[:, None].expand(-1, WIDTH),
        dt_bias=BIAS[:, None].expand(-1, WIDTH),
        dt_softplus=True,
        out=out,
        **table,
    )
    return out


def recurrence(
    state: torch.Tensor, given: dict[str, torch.Tensor], tokens: slice
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """By the definition, token by token: outputs, and the state after each."""
    outs, states = [], []
    repeat = HEADS // GROUPS
    rows = zip(*(given[name][tokens] for name in ("x", "dt", "B", "C")), strict=True)
    for x, dt, B, C in rows:  # noqa: N806
        dt = functional.softplus(dt + BIAS)
        into = (dt[:, None] * x)[:, :, None] * B.repeat_interleave(repeat, 0)[:, None]
        state = state * (dt * RATES).exp()[:, None, None] + into
        read = (state * C.repeat_interleave(repeat, 0)[:, None]).sum(-1)
        outs.append(read + SKIP[:, None] * x)
        states.append(state)
    return torch.stack(outs), states


def states_by_slot() -> torch.Tensor:
    rng = torch.Generator().manual_seed(9)
    return torch.randn((SLOTS, HEADS, WIDTH, DEPTH), generator=rng)


TABLE = ints([1, 0, 0, 0], [2, 3, 4, 0], [5, 6, 7, 8])
LENGTHS = [1, 3, 4]
ACCEPTED = [1, 2, 3]


@pytest.fixture
def cpu_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the worker initialises when it loads a model."""
    monkeypatch.setattr(
        "vllm.model_executor.layers.mamba.ops.ssu_dispatch.get_mamba_ssu_backend",
        lambda: cpu_update,
    )


def cpu_update(*operands: Any, **more: Any) -> None:
    """The CPU build's, whose operands are named where the other backends' are not."""
    *before, bias = operands
    mamba_ssm.selective_state_update(*before, dt_bias=bias, **more)


@pytest.mark.usefixtures("cpu_backend")
def test_mamba2_states_by_column() -> None:
    given, states, before = mamba2_operands(8), states_by_slot(), states_by_slot()
    out = mamba2_update(
        mamba_mixer2.selective_state_update,
        states,
        given,
        state_batch_indices=TABLE,
        dst_state_batch_indices=TABLE,
        num_accepted_tokens=ints(*ACCEPTED),
        cu_seqlens=starts_of(LENGTHS),
    )
    ends = starts_of(LENGTHS).tolist()
    touched = set()
    for row, length in enumerate(LENGTHS):
        tokens = slice(ends[row], ends[row + 1])
        source = int(TABLE[row, ACCEPTED[row] - 1])
        wanted, after = recurrence(before[source], given, tokens)
        torch.testing.assert_close(out[tokens], wanted, rtol=1e-4, atol=1e-4)
        for column, state in enumerate(after):
            slot = int(TABLE[row, column])
            touched.add(slot)
            torch.testing.assert_close(states[slot], state, rtol=1e-4, atol=1e-4)
        assert len(after) == length
    others = [slot for slot in range(SLOTS) if slot not in touched]
    assert torch.equal(states[others], before[others])


@pytest.mark.usefixtures("cpu_backend")
def test_vllm_takes_columns_for_rows() -> None:
    """The table of one row and one draft, of which one token is verified."""
    given, states, before = mamba2_operands(2), states_by_slot(), states_by_slot()
    mamba2_update(
        stock(mamba_mixer2.selective_state_update),
        states,
        given,
        state_batch_indices=ints([1, 2]),
        dst_state_batch_indices=ints([1, 2]),
        num_accepted_tokens=ints(2),
        cu_seqlens=ints(0, 2),
    )
    _, (first, _) = recurrence(before[2], given, slice(0, 2))
    assert not torch.allclose(states[1], first, atol=1e-2)


@pytest.mark.usefixtures("cpu_backend")
def test_vllm_overwrites_the_source_of_a_state() -> None:
    states, before = states_by_slot(), states_by_slot()
    mamba2_update(
        stock(mamba_mixer2.selective_state_update),
        states,
        mamba2_operands(1),
        state_batch_indices=ints(1),
        dst_state_batch_indices=ints(2),
    )
    assert not torch.equal(states[1], before[1])


def test_mamba2_convolution_by_window() -> None:
    rng = torch.Generator().manual_seed(0)
    windows = torch.randn((SLOTS, 8, TAPS - 1 + DRAFTS), generator=rng)
    weight = torch.randn((8, TAPS), generator=rng)
    x = torch.randn((3, 8), generator=rng)
    before = windows.clone()
    call = {
        "conv_state_indices": ints([1, 2, 3, 4]),
        "num_accepted_tokens": ints(3),
        "query_start_loc": ints(0, 3),
        "max_query_len": 4,
    }
    line = torch.cat([before[1, :, 2 : 2 + TAPS - 1], x.T], dim=1)
    wanted = functional.silu(
        functional.conv1d(line[None], weight[:, None], groups=8)[0]
    ).T
    found = mamba_mixer2.causal_conv1d_update(x, windows, weight, None, "silu", **call)
    torch.testing.assert_close(found, wanted)
    assert torch.equal(windows[1, :, : TAPS - 2 + 3], line[:, 1:])
    theirs = stock(mamba_mixer2.causal_conv1d_update)(
        x.clone(), before.clone(), weight, None, "silu", **call
    )
    assert not torch.allclose(theirs, wanted, atol=1e-2), "it takes the offset now"


def test_mamba2_without_drafts_is_vllms_own() -> None:
    rng = torch.Generator().manual_seed(0)
    windows = torch.randn((SLOTS, 8, TAPS - 1), generator=rng)
    weight = torch.randn((8, TAPS), generator=rng)
    x = torch.randn((2, 8), generator=rng)
    call = {"conv_state_indices": ints(1, 2)}
    ours, theirs = windows.clone(), windows.clone()
    update = mamba_mixer2.causal_conv1d_update
    found = update(x.clone(), ours, weight, None, "silu", **call)
    wanted = stock(update)(x.clone(), theirs, weight, None, "silu", **call)
    assert torch.equal(found, wanted) and torch.equal(ours, theirs)
