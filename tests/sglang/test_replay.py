# SPDX-License-Identifier: Apache-2.0
"""Drafts that are recorded: what is folded is what was accepted, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.configs.mamba_utils import (
    KimiLinearCacheParams,
    KimiLinearStateShape,
    Mamba2CacheParams,
    Mamba2StateShape,
)
from sglang.srt.layers.attention.hybrid_linear_attn_backend import Mamba2AttnBackend
from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend
from sglang.srt.layers.attention.linear.kda_backend import KDAAttnBackend
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from hybrid_plugin.config import HybridConfig
from hybrid_plugin.core.commands import Command, Copy, Pool, Take
from hybrid_plugin.core.sequence import LiveSequence
from hybrid_plugin.device.executor import Executor
from hybrid_plugin.sglang.kernels import gated_delta_net, kda, mamba2
from hybrid_plugin.sglang.speculation.replay import passes, records
from hybrid_plugin.sglang.speculation.replay.passes import Replay
from hybrid_plugin.sglang.speculation.replay.scratch import Owner, ReplayScratch
from hybrid_plugin.sglang_cpu import kernels
from tests.sglang import (
    test_kernels_gated_delta_net,
    test_kernels_kda,
    test_kernels_mamba2,
)
from tests.sglang.kernel_passes import backend_of

SLOTS, ROWS, WIDTH = 8, 4, 5
CHAIN, TREE = [-1, 0, 1, 2, 3], [-1, 0, 0, 1, 2]
SHAPES = pytest.mark.parametrize("parents", [CHAIN, TREE], ids=["chain", "tree"])
LAYER_IDS = (3, 7)


@pytest.fixture(autouse=True, scope="module")
def platform() -> None:
    """As a server on a CPU has it."""
    kernels.install()


@pytest.fixture(autouse=True)
def width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "drafts_per_step", lambda: WIDTH)
    arguments = SimpleNamespace(speculative_eagle_topk=2)
    monkeypatch.setattr(passes, "get_spec", lambda: arguments)
    for kind in ("eager", "cuda_graph"):
        monkeypatch.setattr(records, f"get_{kind}_max_batch_size", lambda count: count)


class States:
    """SGLang's `HybridReqToTokenPool` with two state layers, filled with numbers."""

    size = ROWS

    def __init__(self, conv: tuple[int, ...], temporal: tuple[int, ...]) -> None:
        torch.manual_seed(0)
        lead = (len(LAYER_IDS), SLOTS)
        self.temporal = torch.randn(*lead, *temporal)
        self.conv = torch.randn(*lead, *conv)
        cache = SimpleNamespace(temporal=self.temporal, conv=[self.conv])
        self.mamba_pool = SimpleNamespace(mamba_cache=cache)
        self.mamba_map = {layer: place for place, layer in enumerate(LAYER_IDS)}

    def mamba2_layer_cache(self, layer_id: int) -> Any:
        place = self.mamba_map[layer_id]
        return SimpleNamespace(temporal=self.temporal[place], conv=[self.conv[place]])

    def copy(self) -> States:
        other = States(self.conv.shape[2:], self.temporal.shape[2:])
        other.temporal.copy_(self.temporal)
        other.conv.copy_(self.conv)
        return other


class Mixer:
    """A kind of layer: how SGLang calls it, and its steps one by one."""

    def __init__(self, kind: Any, backend: type, shapes: Any, is_kda: bool) -> None:
        self.kind, self.backend, self.shapes = kind, backend, shapes
        self.is_kda = is_kda

    def pools(self) -> States:
        return States(*self.shapes)

    def replay(self, pools: States) -> tuple[Replay, ReplayScratch]:
        replay = Replay()
        replay.is_wanted, replay._is_kda = True, self.is_kda
        scratch = replay.build(pools)
        assert scratch is not None
        return replay, scratch

    def call(self, hook: Any, first: Any, backend: Any, batch: Any, given: Any) -> Any:
        if self.kind is mamba2:
            mixer, hidden = given
            return hook(first, None, backend, mixer, hidden, None, batch.layer, batch)
        layer, tokens = given
        layer.layer_id = batch.layer
        return hook(first, None, backend, layer=layer, forward_batch=batch, **tokens)

    def given(self, tokens: int, layer: int) -> Any:
        if self.kind is mamba2:
            rng = torch.Generator().manual_seed(layer)
            hidden = torch.randn(tokens, test_kernels_mamba2.HIDDEN, generator=rng)
            return test_kernels_mamba2.mixer_with(layer), hidden
        module: Any = test_kernels_kda
        if self.kind is gated_delta_net:
            module = test_kernels_gated_delta_net
        return module.Layer(), module.inputs(tokens)

    def token(self, given: Any, index: int) -> Any:
        if self.kind is mamba2:
            return given[0], given[1][index][None]
        return given[0], {name: x[index][None] for name, x in given[1].items()}


MIXERS = pytest.mark.parametrize(
    "mixer",
    [
        Mixer(
            gated_delta_net, GDNAttnBackend, test_kernels_gated_delta_net.SHAPES, False
        ),
        Mixer(mamba2, Mamba2AttnBackend, test_kernels_mamba2.SHAPES, False),
        Mixer(kda, KDAAttnBackend, test_kernels_kda.SHAPES, True),
    ],
    ids=["gated delta net", "mamba-2", "kda"],
)


def metadata(slots: list[int], parents: list[int] | None) -> Any:
    """SGLang's, of a pass that verifies."""
    count, width = len(slots), 1 if parents is None else WIDTH
    found = SimpleNamespace(
        query_start_loc=torch.arange(0, count * width + 1, width, dtype=torch.int32),
        mamba_cache_indices=torch.tensor(slots, dtype=torch.int32),
        logical_num_tokens=None,
        num_prefills=0,
        num_prefill_tokens=0,
        num_decodes=count,
        replayssm_write_pos=None,
        retrieve_next_token=None,
        retrieve_next_sibling=None,
        retrieve_parent_token=None,
        is_target_verify=parents is not None,
    )
    if parents not in (None, CHAIN):
        children = [[n for n, p in enumerate(parents) if p == d] for d in range(WIDTH)]
        first = [(own or [-1])[0] for own in children]
        siblings = [-1] * WIDTH
        for own in children:
            for one, other in pairwise(own):
                siblings[one] = other
        found.retrieve_next_token = torch.tensor([first] * count)
        found.retrieve_next_sibling = torch.tensor([siblings] * count)
        found.retrieve_parent_token = torch.full((count, WIDTH), 77)
    return found


def backend_with(mixer: Mixer, pools: States, found: Any) -> Any:
    backend = backend_of(mixer.backend, pools)  # type: ignore[arg-type]
    backend.is_draft_worker = False
    backend.accept_lens_pool = None
    backend.forward_metadata = found
    return backend


def batch_of(mode: ForwardMode, layer: int) -> Any:
    return SimpleNamespace(forward_mode=mode, mamba_track_mask=None, layer=layer)


def path_to(parents: list[int], draft: int) -> list[int]:
    path: list[int] = []
    while draft >= 0:
        path.insert(0, draft)
        draft = parents[draft]
    return path


def decode(mixer: Mixer, pools: States, slot: int, layer: int, given: Any) -> Any:
    """One token, on our kernels."""
    backend = backend_with(mixer, pools, metadata([slot], None))
    kind = {gated_delta_net: "GATED_DELTA_NET", mamba2: "MAMBA2", kda: "KDA"}
    ours = test_kernels_mamba2.layers_of(
        getattr(test_kernels_mamba2.Mixer, kind[mixer.kind])
    )
    hook = mixer.kind.forward if mixer.kind is mamba2 else mixer.kind.decode
    return mixer.call(hook, ours, backend, batch_of(ForwardMode.DECODE, layer), given)


@MIXERS
@SHAPES
def test_what_is_committed_is_what_the_path_gives_step_by_step(
    mixer: Mixer, parents: list[int]
) -> None:
    """In each layer; padding and other slots stay as they are.

    `tests/kernels` compare bits.  Here PyTorch rounds otherwise with other numbers of
    rows, in the projections and in exponentials.
    """
    pools = mixer.pools()
    expected, before = pools.copy(), pools.copy()
    replay, scratch = mixer.replay(pools)
    slots, last = [5, 0, 2, 6], [3, 4, 0, 1]
    found = metadata(slots, parents)
    backend = backend_with(mixer, pools, found)
    for layer in LAYER_IDS:
        given = mixer.given(len(slots) * WIDTH, layer)
        batch = batch_of(ForwardMode.TARGET_VERIFY, layer)
        out = mixer.call(mixer.kind.verify, replay, backend, batch, given)
        for row, slot in enumerate(slots):
            if slot == 0:
                continue
            for draft in path_to(parents, last[row]):
                token = row * WIDTH + draft
                one = decode(mixer, expected, slot, layer, mixer.token(given, token))
                torch.testing.assert_close(
                    out.view(len(slots) * WIDTH, -1)[token], one.view(-1)
                )
    assert torch.equal(pools.temporal, before.temporal)
    assert torch.equal(pools.conv, before.conv)
    hybrid = SimpleNamespace(linear_attn_backend=backend)
    passes.commit(replay, unwanted, hybrid, torch.tensor(last), None, None)
    found.mamba_cache_indices.fill_(1)  # of the next pass, in a graph
    scratch.note_owners([owner(str(row), slot) for row, slot in enumerate(slots)])
    scratch.settle([], lambda _: True, keep_live=False)
    for found, wanted in (
        (pools.temporal, expected.temporal),
        (pools.conv, expected.conv),
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def unwanted(*_: Any, **__: Any) -> None:
    raise AssertionError("SGLang's own way was taken")


@MIXERS
def test_other_passes_are_left_to_others(mixer: Mixer) -> None:
    pools = mixer.pools()
    replay, _ = mixer.replay(pools)
    seen: list[Any] = []

    def original(*args: Any, **kwargs: Any) -> str:
        seen.append(args)
        return "theirs"

    def hook(first: Any, _: Any, *args: Any, **kwargs: Any) -> Any:
        return mixer.kind.verify(first, original, *args, **kwargs)

    given = mixer.given(WIDTH, LAYER_IDS[0])
    backend = backend_with(mixer, pools, metadata([1], CHAIN))
    draft_worker = backend_with(mixer, pools, metadata([1], CHAIN))
    draft_worker.is_draft_worker = True
    for own, worker, mode in (
        (replay, backend, ForwardMode.EXTEND),
        (replay, draft_worker, ForwardMode.TARGET_VERIFY),
        (Replay(), backend, ForwardMode.TARGET_VERIFY),
    ):
        batch = batch_of(mode, LAYER_IDS[0])
        assert mixer.call(hook, own, worker, batch, given) == "theirs"
    assert len(seen) == 3
    passes.commit(Replay(), lambda *args: seen.append(args), "backend", "steps", 1)
    assert seen[3] == ("backend", "steps", 1)


# ------------------------------------------------------------------------- folding


def owner(name: str, slot: int) -> Owner:
    return Owner(
        name,
        LiveSequence(
            namespace=None,
            pages=[],  # type: ignore[arg-type]
            slot=slot,
            hit=0,
            planned={},
            prompt_length=1,
            locked=None,
            cacheable=True,
        ),
    )


class Folding:
    """Rows of a step whose record holds one number a draft: tokens 1, 2, 4, ..."""

    def __init__(self) -> None:
        temporal = torch.zeros(1, SLOTS, 1, 1, 1)
        conv = torch.zeros(1, SLOTS, 3, 1)
        states = SimpleNamespace(temporal=temporal, conv=[conv])
        self.records = records.Records.allocated(states, ROWS, WIDTH, is_kda=False)
        self.scratch = ReplayScratch(self.records)
        self.states = temporal[0, :, 0, 0, 0]
        self.live: set[str] = set()

    def verify(self, slots: list[int], accepted: list[int]) -> None:
        """A step that adds ``2 ** draft`` for each draft, and what it accepted."""
        record = self.records.of(0).states
        record[..., 0] = record[..., 2] = 1  # key and decay
        record[..., 1] = 2.0 ** torch.arange(WIDTH)
        table = torch.arange(len(slots) * WIDTH).view(len(slots), WIDTH)
        path = table.clone()
        for row, count in enumerate(accepted):
            path[row, count:] = -1
        self.scratch.note_path(path, WIDTH)
        self.scratch.note_accepted(torch.tensor(slots), torch.tensor(accepted), None)
        self.live = {str(slot) for slot in slots}
        self.scratch.note_owners([owner(str(slot), slot) for slot in slots])

    def settle(self, commands: list[Command] | None = None, **how: bool) -> None:
        self.scratch.settle(
            commands or [], lambda one: one.name in self.live, **(KEEP | how)
        )


KEEP = {"keep_live": True}


def test_drafts_stay_while_their_sequence_lives_and_no_step_verifies() -> None:
    step = Folding()
    step.verify([3, 5], [2, 4])
    step.settle()
    assert step.states.tolist() == [0] * SLOTS
    step.live.remove("5")
    step.settle()
    assert step.states.tolist() == [0, 0, 0, 0, 0, 15, 0, 0]
    step.settle()  # once only
    step.settle(keep_live=False)
    assert step.states.tolist() == [0, 0, 0, 3, 0, 15, 0, 0]
    step.settle(keep_live=False)
    assert step.states.tolist() == [0, 0, 0, 3, 0, 15, 0, 0]


@pytest.mark.parametrize("keep_live", [True, False])
def test_who_ended_is_cut_where_its_known_tokens_end(keep_live: bool) -> None:
    step = Folding()
    step.verify([3, 5, 6], [4, 4, 4])
    step.live = {"3"}
    takes: list[Command] = [Take(Pool.STATE, 1, 0, 5), Take(Pool.STATE, 2, 2, 6)]
    step.settle([Copy(Pool.STATE, 5, 1), *takes], keep_live=keep_live)
    step.scratch.take(takes)  # type: ignore[arg-type]
    kept = 0 if keep_live else 15
    assert step.states.tolist() == [0, 0, 0, kept, 0, 1, 7, 0]


def test_the_slot_of_who_was_gone_before_the_step_is_left_alone() -> None:
    step = Folding()
    step.verify([3, 5], [1, 1])
    step.scratch.note_owners([owner("3", 3), None])
    step.settle(keep_live=False)
    assert step.states.tolist() == [0, 0, 0, 1, 0, 0, 0, 0]


def test_a_state_is_taken_from_its_own_row_only() -> None:
    for take in (
        Take(Pool.STATE, 0, 0, 5),  # another slot
        Take(Pool.STATE, 1, 0, 5),  # of a sequence that lives
    ):
        step = Folding()
        step.verify([3, 5], [2, 2])
        step.live = {"5"}
        with pytest.raises(RuntimeError, match="is not that of a sequence's end"):
            step.settle([take])


def test_no_state_is_taken_once_its_drafts_are_folded() -> None:
    step = Folding()
    step.verify([3], [2])
    step.settle(keep_live=False)
    step.live.clear()
    with pytest.raises(RuntimeError, match="from drafts that were folded"):
        step.settle([Take(Pool.STATE, 0, 0, 3)])


def test_no_state_is_taken_where_nobody_folds() -> None:
    step = Folding()
    step.verify([3], [2])
    executor = Executor({})
    executor.scratch = step.scratch
    with pytest.raises(RuntimeError, match="before its drafts were folded"):
        executor.run([Take(Pool.STATE, 0, 0, 3)])


def test_records_are_not_written_before_they_are_folded() -> None:
    step = Folding()
    step.verify([3], [2])
    with pytest.raises(RuntimeError, match="before those of the last step"):
        step.verify([3], [2])


# -------------------------------------------------------------------------- memory


def mamba2_params() -> Any:
    shape = Mamba2StateShape.create(
        tp_world_size=1,
        intermediate_size=16,
        n_groups=1,
        num_heads=2,
        head_dim=8,
        state_size=4,
        conv_kernel=4,
    )
    return Mamba2CacheParams(shape=shape, layers=[0, 2])


def kda_params() -> Any:
    shape = KimiLinearStateShape.create(
        tp_world_size=1, num_heads=2, head_dim=8, conv_kernel_size=4
    )
    return KimiLinearCacheParams(shape=shape, layers=[0, 1, 2])


@pytest.mark.parametrize("make", [mamba2_params, kda_params], ids=["mamba-2", "kda"])
def test_what_is_charged_is_what_records_take(make: Callable[[], Any]) -> None:
    params = make()
    lead = (len(params.layers), SLOTS)
    states = SimpleNamespace(
        temporal=torch.zeros(*lead, *params.shape.temporal),
        conv=[torch.zeros(*lead, *params.shape.conv[0], dtype=params.dtype.conv)],
    )
    taken = records.Records.allocated(states, ROWS, WIDTH, is_kda=params.is_kda)
    tensors = [
        tensor
        for place in range(lead[0])
        for tensor in (taken.of(place).states, taken.of(place).inputs)
    ]
    size = sum(tensor.numel() * tensor.itemsize for tensor in tensors)
    assert size == ROWS * records.row_bytes(params, WIDTH)


def test_pools_are_built_without_states_after_drafts() -> None:
    seen: list[Any] = []

    def original(*args: Any, **kwargs: Any) -> None:
        seen.append(kwargs)

    replay = Replay()
    passes.without_draft_states(replay, original, 1, speculative_num_draft_tokens=4)
    replay.settle(HybridConfig(draft_states="columns"), SimpleNamespace())
    passes.without_draft_states(replay, original, 1, speculative_num_draft_tokens=4)
    replay.is_wanted = True
    passes.without_draft_states(replay, original, 1, speculative_num_draft_tokens=4)
    assert [one["speculative_num_draft_tokens"] for one in seen] == [4, 4, None]
