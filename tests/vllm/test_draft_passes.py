# SPDX-License-Identifier: Apache-2.0
"""Passes that verify drafts in vLLM on our kernels, as its builders describe them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.platforms import current_platform
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadataBuilder
from vllm.v1.worker.gpu.model_states import mamba_hybrid
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from hybrid_plugin.config import ConfigError
from hybrid_plugin.core.commands import Pool, SaveInPass
from hybrid_plugin.device.interior import InteriorSnapshots
from hybrid_plugin.engine.kernel_choice import (
    EVERY,
    FLASHINFER,
    TRITON,
    Mixer,
    Phase,
)
from hybrid_plugin.mixers import flashinfer_rule
from hybrid_plugin.mixers.long_prefill import LongKernel
from hybrid_plugin.vllm import patches
from hybrid_plugin.vllm.kernels import draft_passes, layers, passes
from hybrid_plugin.vllm.kernels.draft_passes import DraftCounts
from hybrid_plugin.vllm.kernels.fixed_shape import GraphLimits
from hybrid_plugin.vllm.kernels.layers import StateLayers
from hybrid_plugin.vllm.kernels.verification_tables import VerificationTables
from hybrid_plugin.vllm.wrapping import WRAPPED
from tests.kernels.common import relative_error
from tests.mixers.fake_flashinfer import chunk_gated_delta_rule
from tests.vllm import test_gated_delta_net as net
from tests.vllm.kernel_passes import (
    SLOTS,
    Row,
    common_of,
    config_with,
    gdn_builder,
)

pytestmark = pytest.mark.skipif(
    not current_platform.is_cpu(), reason="vLLM's own functions of a CPU are hooked"
)

DRAFTS = 3
WIDTH = 1 + DRAFTS


@pytest.fixture(autouse=True, scope="module")
def hooked() -> None:
    patches.patch_kernels([Mixer.GATED_DELTA_NET], drafts=True)


@dataclass(frozen=True)
class Part:
    """A sequence's row of a pass."""

    start: int
    """Tokens of it computed before."""
    tokens: Sequence[int]
    """Numbers of the tokens that it takes; a wrong draft's is of no sequence."""
    columns: Sequence[int]
    """Its slots."""
    accepted: int = 1
    """Tokens that its last pass got accepted."""
    in_prompt: bool = False


PADDING = Part(0, (), (0,), in_prompt=True)
LIMITS = GraphLimits(most=6, tokens=64, chunks=16, width=WIDTH)
"""Of graphs with prefills."""
shapes = pytest.mark.parametrize(
    "padded", [None, (6, 16), (6, 64)], ids=["as it comes", "graph", "larger graph"]
)


def layer_with(drafts: int) -> net.Layer:
    layer = net.layer_with()
    layer.get_state_dtype = lambda: (torch.bfloat16, torch.float32)
    wide = torch.full((SLOTS, net.TAPS - 1 + drafts, net.CHANNELS), torch.nan)
    layer.kv_cache = wide.bfloat16(), layer.kv_cache[1]
    return layer


def ours_of(layer: net.Layer, drafts: int, rows: int = 0) -> StateLayers:
    kind = layers.Kind(Mixer.GATED_DELTA_NET, "gated_delta_net")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "kind_of", lambda _: kind)
        found = StateLayers(
            {"0": layer}, "ours", "cpu", drafts=drafts, recorded_rows=rows
        )
    found.hang()
    found.fold_records()
    return found


def builder_of(layer: net.Layer, drafts: int) -> Any:
    builder = gdn_builder({"0": layer})
    builder.use_spec_decode = drafts > 0
    builder.num_spec = drafts
    return builder


def common_with(parts: Sequence[Part]) -> Any:
    rows = [
        Row(part.columns[0], part.start, len(part.tokens), part.in_prompt)
        for part in parts
    ]
    table = torch.zeros((len(parts), WIDTH), dtype=torch.int32)
    for row, part in enumerate(parts):
        table[row, : len(part.columns)] = torch.tensor(part.columns)
    return replace(common_of(rows), block_table_tensor=table)


def counts_with(parts: Sequence[Part]) -> tuple[torch.Tensor, torch.Tensor]:
    drafts = [-1 if part.in_prompt else len(part.tokens) - 1 for part in parts]
    accepted = [part.accepted for part in parts]
    return torch.tensor(accepted, dtype=torch.int32), torch.tensor(drafts)


def run(
    layer: net.Layer,
    builder: Any,
    parts: Sequence[Part],
    padded: tuple[int, int] | None = None,
) -> list[torch.Tensor]:
    """A pass; the outputs of each row.

    Args:
        layer: whose.
        builder: its.
        parts: the rows.
        padded: rows and tokens of the graph that replays it.
    """
    numbers = [number for part in parts for number in part.tokens]
    count, length = padded or (len(parts), len(numbers))
    rows = [*parts, *[PADDING] * (count - len(parts))]
    common = replace(common_with(rows), num_actual_tokens=length)
    metadata = builder.build(0, common, *counts_with(rows))
    given = [torch.stack(x) for x in zip(*map(token, numbers), strict=True)]
    nobody = [x.new_full((length - len(x), *x.shape[1:]), torch.nan) for x in given]
    given = [torch.cat(both) for both in zip(given, nobody, strict=True)]
    out = torch.full((length, net.VALUE_HEADS, net.WIDTH), torch.nan).bfloat16()
    gdn_attention._cpu_gdn_attention_spec_aware(
        layer, metadata, *given, out, net.TAPS, layer.kv_cache[0].shape[1]
    )
    assert passes.of(metadata).same_rows == (padded is not None)
    return list(out[: len(numbers)].split([len(part.tokens) for part in parts]))


def token(number: int) -> tuple[torch.Tensor, ...]:
    """What the layer takes of a token."""
    mixed, b, a = net.inputs(1, 1000 + number)
    return mixed[0], b[0], a[0]


CLOSE = {"rtol": 0.02, "atol": 1e-5}
"""As products of batches of other sizes round."""


@dataclass(frozen=True)
class Alone:
    """A sequence without drafts, a token at a time behind its prompt."""

    prompt: int
    outs: list[torch.Tensor]
    """Of each token."""
    states: dict[int, tuple[torch.Tensor, ...]]
    """By the tokens behind which they are."""


def alone(numbers: Sequence[int], prompt: int) -> Alone:
    layer = layer_with(0)
    ours_of(layer, 0)
    builder, found = gdn_builder({"0": layer}), Alone(prompt, [], {})
    parts = [(0, prompt), *((n, n + 1) for n in range(prompt, len(numbers)))]
    for start, end in parts:
        metadata = builder.build(0, common_of([Row(3, start, end - start, start == 0)]))
        given = [
            torch.stack(x) for x in zip(*map(token, numbers[start:end]), strict=True)
        ]
        out = torch.zeros(end - start, net.VALUE_HEADS, net.WIDTH).bfloat16()
        gdn_attention._cpu_gdn_attention_nonspec(layer, metadata, *given, out)
        found.outs.extend(out)
        found.states[end] = tuple(states[3].clone() for states in layer.kv_cache)
    return found


A, B, C = range(100, 120), range(200, 220), range(300, 320)
"""Tokens of three sequences."""
WRONG = 999
COLUMNS = {"a": (3, 6, 7, 8), "b": (4, 9, 10, 11)}


HALF_PRECISION = 1.5e-2
"""How far queries and keys that are rounded to bfloat16 move a result."""
FIRST = (
    Part(0, A[:5], COLUMNS["a"][:1], in_prompt=True),
    Part(0, B[:7], COLUMNS["b"][:1], in_prompt=True),
)
"""Prompts."""


def passes_of_drafts() -> tuple[list[Part], ...]:
    """Prompts, ragged drafts, a step without any, and prompts beside drafts."""
    a, b = COLUMNS["a"], COLUMNS["b"]
    return (
        [*FIRST],
        # Two of three drafts are right; of the other's, none.
        [Part(5, [*A[5:8], WRONG], a), Part(7, [B[7], WRONG, WRONG], b[:3])],
        # All are right; no drafts.
        [Part(8, A[8:12], a, accepted=3), Part(8, B[8:9], b, accepted=1)],
        # A prompt of as many tokens as the longest row comes before a row without
        # drafts, as vLLM's second runner sorts them.
        [
            Part(12, [A[12], WRONG, WRONG, WRONG], a, accepted=4),
            Part(0, C[:4], (5,), in_prompt=True),
            Part(9, B[9:10], b, accepted=1),
        ],
        # A prompt goes on by a single token.
        [
            Part(13, A[13:16], a, accepted=1),
            Part(10, B[10:12], b, accepted=1),
            Part(4, C[4:5], (5,), in_prompt=True),
        ],
    )


@pytest.fixture(scope="module")
def without() -> dict[int, Alone]:
    """The sequences without drafts, by the first token of each."""
    lengths = ((A, 5), (B, 7), (C, 4))
    return {tokens[0]: alone(tokens, prompt) for tokens, prompt in lengths}


@shapes
def test_drafts_change_nothing(
    without: dict[int, Alone], padded: tuple[int, int] | None
) -> None:
    """Outputs of accepted tokens, and the states left, are those without drafts."""
    mine = layer_with(DRAFTS)
    ours_of(mine, DRAFTS).graphs = LIMITS
    builder = builder_of(mine, DRAFTS)
    checked = 0
    for parts in passes_of_drafts():
        outs = run(mine, builder, parts, padded)
        for part, out in zip(parts, outs, strict=True):
            first = part.tokens[0] // 100 * 100
            for i, number in enumerate(part.tokens):
                if number != first + part.start + i:
                    break
                expected = without[first].outs[part.start + i]
                torch.testing.assert_close(out[i], expected, **CLOSE)
                checked += 1
    assert checked == 5 + 7 + 3 + 1 + 4 + 1 + 1 + 4 + 1 + 3 + 2 + 1
    # The last pass left the state after each of its tokens in a column of its own.
    for columns, first, end, length in (
        (COLUMNS["a"], A[0], 16, 3),
        (COLUMNS["b"], B[0], 12, 2),
    ):
        for column in range(length):
            inputs, state = without[first].states[end - length + 1 + column]
            slot = columns[column]
            assert torch.equal(mine.kv_cache[0][slot, : net.TAPS - 1], inputs)
            torch.testing.assert_close(mine.kv_cache[1][slot], state, **CLOSE)


def test_a_wrong_column_shows(without: dict[int, Alone]) -> None:
    """Negative control: one draft more than was accepted."""
    mine = layer_with(DRAFTS)
    ours_of(mine, DRAFTS)
    builder = builder_of(mine, DRAFTS)
    first, second, third, *_ = passes_of_drafts()
    run(mine, builder, first)
    run(mine, builder, second)
    out, _ = run(mine, builder, [replace(third[0], accepted=4), third[1]])
    assert not torch.allclose(out[0], without[A[0]].outs[8], **CLOSE)


ACCEPTED = ((1, 1), (3, 1), (4, 1), (1, 1, 1), (3, 2, 1))
"""Of each row of `passes_of_drafts`, the known token counted."""


@shapes
@pytest.mark.parametrize("wrong", [False, True])
def test_replay_changes_nothing(
    without: dict[int, Alone], wrong: bool, padded: tuple[int, int] | None
) -> None:
    """With one state for each sequence; negative control: one draft too few."""
    mine = layer_with(DRAFTS)
    found = ours_of(mine, DRAFTS, rows=8)
    found.graphs, records = LIMITS, found.records
    assert records is not None
    builder, differing = builder_of(mine, DRAFTS), 0
    for parts, accepted in zip(passes_of_drafts(), ACCEPTED, strict=True):
        parts = [replace(part, columns=part.columns[:1]) for part in parts]
        records.fold()
        for part, out in zip(parts, run(mine, builder, parts, padded), strict=True):
            first = part.tokens[0] // 100 * 100
            for i, number in enumerate(part.tokens):
                if number != first + part.start + i:
                    break
                expected = without[first].outs[part.start + i]
                differing += not torch.allclose(out[i], expected, **CLOSE)
        counts = torch.tensor(accepted, dtype=torch.int32)
        records.accepted((counts - int(wrong)).clamp(min=1))
    assert bool(differing) == wrong
    if not wrong:
        records.fold()
        for slot, first, end in ((3, A[0], 16), (4, B[0], 12), (5, C[0], 5)):
            inputs, state = without[first].states[end]
            assert torch.equal(mine.kv_cache[0][slot, : net.TAPS - 1], inputs)
            torch.testing.assert_close(mine.kv_cache[1][slot], state, **CLOSE)
        rest = [slot for slot in range(SLOTS) if slot not in (3, 4, 5)]
        assert mine.kv_cache[1][rest].isnan().all()


@pytest.mark.parametrize("keeps", [False, True])
def test_long_prompts_beside_drafts_are_divided(
    keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashInfer's kernel runs most of them, whether or not they keep states."""
    for name in ("DEPTH", "WIDTH"):
        monkeypatch.setattr(net, name, 128)
    monkeypatch.setattr(net, "CHANNELS", 128 * (2 * net.KEY_HEADS + net.VALUE_HEADS))
    seen: list[int] = []

    def function(**call: Any) -> Any:
        seen.append(len(call["q"]))
        return chunk_gated_delta_rule(**call)

    long: list[Part] = [
        Part(5, A[5:9], (3,)),
        Part(7, range(400, 550), (4,), in_prompt=True),
        Part(0, range(600, 740), (5,), in_prompt=True),
    ]
    outs, pools = [], []
    for kernel in (None, LongKernel(function, 128)):
        mine = layer_with(DRAFTS)
        found = ours_of(mine, DRAFTS, rows=8)
        kernels, builder = layers.ours(mine), builder_of(mine, DRAFTS)
        assert kernels is not None and found.records is not None
        kernels.long, found.interior = kernel, InteriorSnapshots(torch.device("cpu"))
        run(mine, builder, FIRST)
        assert not seen, "short prompts are ours"
        if keeps:
            found.interior.order([SaveInPass(Pool.STATE, 5, 1, 9)])
        outs.append(torch.cat(run(mine, builder, long)))
        pools.append(mine.kv_cache[1])
    assert seen == [150 - 57 + 140], "what is not yet on the grid is ours"
    assert relative_error(*outs) < HALF_PRECISION
    for slot in (4, 5, *((9,) if keeps else ())):
        assert relative_error(*(pool[slot] for pool in pools)) < HALF_PRECISION, slot


def test_layers_without_kernels_for_records_are_refused() -> None:
    layer = layer_with(DRAFTS)
    for option in ("auto", "engine"):
        with pytest.raises(ConfigError, match='"draft_states" is "replay", and there'):
            StateLayers({"0": layer}, option, "cpu", drafts=DRAFTS, recorded_rows=8)


@pytest.mark.parametrize("v2", [False, True])
def test_what_was_accepted_is_noted_where_the_runner_counts_it(v2: bool) -> None:
    patches.patch_accepted(v2=v2)
    mine = layer_with(DRAFTS)
    records = ours_of(mine, DRAFTS, rows=8).records
    assert records is not None
    records.recorded(torch.tensor([3, 4], dtype=torch.int32))
    counted = torch.tensor([9, 0, 3, 9], dtype=torch.int32)
    given: Any = SimpleNamespace(
        vllm_config=config_with({"0": mine}),
        speculative_config=None,  # where vLLM's own function ends at once
        num_accepted_tokens=SimpleNamespace(gpu=counted[1:]),
        num_accepted_tokens_gpu=counted.clamp(min=1),
        recoverssm=None,
    )
    if v2:
        state_of = vars(MambaHybridModelState)["postprocess_state"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mamba_hybrid, "_scatter_num_accepted_kernel", _NoKernel())
            given._align_mode = False
            state_of(given, torch.tensor([1, 2]), torch.tensor([0, 3]), None)
    else:
        GPUModelRunner._update_states_after_model_execute(
            given, torch.zeros(2, WIDTH), None
        )
    assert records.tokens[:2].tolist() == [1, 3]


class _NoKernel:
    """A Triton kernel that a CPU cannot run."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *_: None


def test_kernels_with_drafts_are_all_ours_or_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = layer_with(DRAFTS)
    phases = {phase: {TRITON: EVERY} for phase in (Phase.PREFILL, Phase.DECODE)}
    measured = {Mixer.GATED_DELTA_NET: phases}
    monkeypatch.setattr("hybrid_plugin.engine.kernel_choice.AS_FAST", measured)
    monkeypatch.setattr(
        "hybrid_plugin.engine.kernel_choice.measured_here", lambda: True
    )
    kind = layers.Kind(Mixer.GATED_DELTA_NET, "gated_delta_net")
    monkeypatch.setattr(layers, "kind_of", lambda _: kind)
    assert StateLayers({"0": layer}, "auto", "cuda").is_whole
    with_drafts = StateLayers({"0": layer}, "auto", "cuda", drafts=DRAFTS)
    assert not with_drafts.mixers and not with_drafts.keep_interior
    assert StateLayers({"0": layer}, "ours", "cuda", drafts=DRAFTS).is_whole


@pytest.mark.parametrize("option", ["auto", "ours"])
def test_with_records_ours_run_all_but_what_flashinfer_runs_faster(
    option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = layer_with(DRAFTS)
    layer.gdn_prefill_backend = FLASHINFER
    choice = "hybrid_plugin.engine.kernel_choice"
    phases = {Phase.PREFILL: {FLASHINFER: 128}, Phase.DECODE: {TRITON: EVERY}}
    monkeypatch.setattr(f"{choice}.AS_FAST", {Mixer.GATED_DELTA_NET: phases})
    monkeypatch.setattr(f"{choice}.measured_here", lambda: True)
    monkeypatch.setattr(flashinfer_rule, "find", lambda: chunk_gated_delta_rule)
    kind = layers.Kind(Mixer.GATED_DELTA_NET, "gated_delta_net")
    monkeypatch.setattr(layers, "kind_of", lambda _: kind)
    found = StateLayers({"0": layer}, option, "cuda", drafts=DRAFTS, recorded_rows=8)
    assert found.is_whole and found.keep_interior
    found.hang()
    kernels = layers.ours(layer)
    assert kernels is not None and kernels.longest == EVERY
    expected = LongKernel(chunk_gated_delta_rule, 128) if option == "auto" else None
    assert kernels.long == expected
    said = "FlashInfer's runs most of prefills of more than 128 tokens"
    assert (said in found.describe()) == (option == "auto")


def test_tables_stay_where_a_graph_finds_them() -> None:
    mine = layer_with(DRAFTS)
    ours_of(mine, DRAFTS)
    builder = builder_of(mine, DRAFTS)

    def described(*parts: Part) -> passes.StatePass:
        metadata = builder.build(0, common_with(parts), *counts_with(parts))
        return passes.of(metadata)

    three = [Part(9, A[:4], (slot, 9, 10, 11), accepted=1) for slot in (3, 4, 5)]
    captured = described(*three).verifications
    assert captured is not None
    found = described(replace(three[1], columns=(4, 9), accepted=2, tokens=A[:2]))
    again = found.verifications
    assert again is not None and found.verified == found.tokens == 2
    for name in ("cu_seqlens", "slots", "columns"):
        old, new = getattr(captured, name), getattr(again, name)
        assert old.data_ptr() == new.data_ptr()
    # What the graph finds behind the pass's only row are empty rows without slots.
    assert captured.cu_seqlens.tolist() == [0, 2, 2, 2]
    assert captured.slots.tolist() == [9, -1, -1]
    assert captured.columns.tolist() == [[4, 9, -1, -1], [-1] * 4, [-1] * 4]
    # A pass with a prompt is no graph's: it leaves the tables alone.
    mixed = described(three[0], Part(0, C[:9], (6,), in_prompt=True))
    assert mixed.verifications is not None and mixed.verified == 4
    assert captured.slots.tolist() == [9, -1, -1]


def test_a_graph_of_prompts_and_drafts_finds_every_row_in_one_table() -> None:
    mine = layer_with(DRAFTS)
    found = ours_of(mine, DRAFTS)
    found.graphs, found.interior = LIMITS, InteriorSnapshots(torch.device("cpu"))
    builder = builder_of(mine, DRAFTS)

    def described(*parts: Part) -> passes.StatePass:
        rows = [*parts, *[PADDING] * (6 - len(parts))]
        common = replace(common_with(rows), num_actual_tokens=64)
        made = passes.of(builder.build(0, common, *counts_with(rows)))
        assert made.same_rows and made.tokens == 64 and made.order is None
        return made

    captured = described()
    found.interior.order([SaveInPass(Pool.STATE, 6, 0, 9)])
    again = described(
        Part(0, C[:9], (6,), in_prompt=True),
        Part(9, A[:3], (3, 7, 8, 10), accepted=2),
        Part(70, B[:1], (5,), in_prompt=True),  # goes on as a decode does
    )
    prompts, drafts = captured.prefills, captured.verifications
    assert prompts is not None and drafts is not None
    assert prompts.boundary_slots is not None and drafts.columns is not None
    for kind in ("prefills", "verifications"):
        one, other = getattr(captured, kind), getattr(again, kind)
        for name in ("cu_seqlens", "slots"):
            place = getattr(one, name).data_ptr(), getattr(other, name).data_ptr()
            assert place[0] == place[1]
    assert prompts.cu_seqlens.tolist() == drafts.cu_seqlens.tolist()
    assert drafts.cu_seqlens.tolist() == [0, 9, 12, 13, 13, 13, 13]
    assert prompts.slots.tolist() == [6, -1, -1, -1, -1, -1]
    assert drafts.slots.tolist() == [-1, 7, 5, -1, -1, -1]
    assert prompts.boundary_slots[:, 0].tolist() == [9, -1, -1, -1, -1, -1]


def test_graphs_of_drafts_alone_have_other_shapes() -> None:
    for width in (2, 4, 16):
        limits = GraphLimits(most=128, tokens=2048, chunks=128, width=width)
        for tokens in range(16, 2049, 16):
            rows = limits.rows(tokens)
            assert (
                rows * width != tokens and limits.hold(rows, tokens) and rows < tokens
            )
            uniform = tokens // width
            assert not limits.hold(uniform, uniform * width)
    alone = GraphLimits(most=1, tokens=64, chunks=128, width=16)
    assert alone.rows(16) == 0 and alone.rows(64) == 1


def test_padding_has_no_slots() -> None:
    tables = VerificationTables(8, WIDTH, torch.device("cpu"))
    parts = [Part(9, A[:4], (3, 4, 5, 6), accepted=2), Part(9, A[:4], (0,))]
    common = common_with(parts)
    accepted, drafts = counts_with(parts)
    found = draft_passes.describe(common, DraftCounts(accepted, drafts), tables, None)
    assert found.verifications is not None
    assert found.verifications.slots.tolist() == [4, -1]
    assert found.verifications.columns.tolist() == [[3, 4, 5, 6], [-1] * 4]
    # A graph is captured before any drafts are known.
    captured = draft_passes.describe(common, DraftCounts(accepted, None), tables, None)
    assert captured.verified == 8 and captured.prefills is None


def test_groups_share_what_was_described_and_not_where_it_lies() -> None:
    mine = layer_with(DRAFTS)
    ours_of(mine, DRAFTS)
    one, other = builder_of(mine, DRAFTS), builder_of(mine, DRAFTS)
    parts = [Part(9, A[:4], (3, 4, 5, 6), accepted=3)]
    common = common_with(parts)
    built = one.build(0, common, *counts_with(parts))
    again = other.update_block_table(
        built, common.block_table_tensor, common.slot_mapping
    )
    found = [passes.of(metadata).verifications for metadata in (built, again)]
    assert found[0] is not None and found[1] is not None
    assert found[0].slots.tolist() == found[1].slots.tolist() == [5]
    assert found[0].columns.data_ptr() != found[1].columns.data_ptr()


@pytest.mark.parametrize("drafts", [0, DRAFTS])
def test_vllm_makes_no_tables_of_drafts_that_nobody_reads(drafts: int) -> None:
    """Of another pass its kernels may run a layer."""
    layer = layer_with(drafts)
    ours_of(layer, drafts)
    builder = builder_of(layer, drafts)
    parts = [Part(5, A[5:7], COLUMNS["a"]), Part(0, B[:7], (4,), in_prompt=True)]
    told = counts_with(parts) if drafts else ()
    metadata = builder.build(0, common_with(parts), *told)
    assert metadata.num_actual_tokens == 9
    made = metadata.num_prefills, metadata.non_spec_state_indices_tensor is not None
    assert made == ((0, False) if drafts else (2, True))
    other = builder.update_block_table(metadata, torch.zeros(2, WIDTH), None)
    assert other is not metadata
    assert passes.of(other).tokens == passes.of(metadata).tokens == 9


def test_what_a_builder_is_told_is_read_by_name() -> None:
    one, two = torch.ones(1), torch.ones(2)
    named = {"num_accepted_tokens": one, "num_decode_draft_tokens_cpu": two}
    builders = (GDNAttentionMetadataBuilder, Mamba2AttentionMetadataBuilder)
    for builder in builders:
        build = getattr(builder.build, WRAPPED, builder.build)
        assert draft_passes.counts_of(build, (), named) == DraftCounts(one, two)
        assert draft_passes.counts_of(build, (), {}) == DraftCounts(None, None)
    # vLLM captures graphs of gated delta nets with the counts in place.
    build = getattr(builders[0].build, WRAPPED)
    assert draft_passes.counts_of(build, (one, two), {}) == DraftCounts(one, two)


@pytest.mark.parametrize("rows", [0, 8])
def test_warming_up_touches_no_state(rows: int) -> None:
    mine = layer_with(DRAFTS)
    ours_of(mine, DRAFTS, rows).warm_up(3)
    assert all(states.isnan().all() for states in mine.kv_cache)
