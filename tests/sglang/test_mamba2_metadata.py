# SPDX-License-Identifier: Apache-2.0
"""Chunks of Mamba-2 prefills: SGLang's own, found without reading the device."""

from __future__ import annotations

import inspect
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("sglang")

from sglang.srt.layers.attention.mamba.mamba2_metadata import (
    ForwardMetadata,
    Mamba2Metadata,
)
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from hybrid_plugin.sglang import patches
from hybrid_plugin.sglang.mamba2_metadata import chunk_starts, prepare_mixed

_READS = {
    getattr(torch.Tensor, name)
    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__index__")
}


class OnDevice(torch.Tensor):
    """Stands for a tensor on a device that is busy: nobody may read it."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _READS:
            raise AssertionError(f"{func.__name__} of a tensor on the device")
        return super().__torch_function__(func, types, args, kwargs or {})


def on_device(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32).as_subclass(OnDevice)


def original(*args: Any) -> Any:
    """SGLang's own method, also where another test has hooked it."""
    return inspect.unwrap(Mamba2Metadata.__dict__["prepare_mixed"].__func__)(*args)


def batch_of(requests: list[tuple[int, int]], **changes: Any) -> tuple[Any, Any]:
    """SGLang's metadata and batch of prefills: `(length, prefix)` of each."""
    lengths, prefixes = [n for n, _ in requests], [p for _, p in requests]
    bounds = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    metadata = ForwardMetadata(
        query_start_loc=on_device(bounds),
        mamba_cache_indices=on_device(list(range(len(requests)))),
    )
    batch = {
        "extend_num_tokens": sum(lengths),
        "logical_forward_mode": ForwardMode.EXTEND,
        "forward_mode": ForwardMode.EXTEND,
        "spec_info": None,
        "extend_seq_lens_cpu": lengths,
        "extend_prefix_lens_cpu": prefixes,
        "extend_seq_lens": on_device(lengths),
        "extend_prefix_lens": on_device(prefixes),
        "seq_lens": on_device([sum(pair) for pair in requests]),
    }
    return metadata, SimpleNamespace(**batch | changes)


def readable(found: Any) -> Any:
    """The same record of plain tensors."""
    if isinstance(found, torch.Tensor):
        return found.as_subclass(torch.Tensor)
    if isinstance(found, list):
        return [readable(part) for part in found]
    if isinstance(found, (SimpleNamespace, ForwardMetadata)):
        return type(found)(**{n: readable(part) for n, part in vars(found).items()})
    return found


def refuse(*_: Any) -> None:
    raise AssertionError("SGLang's own method was called")


def assert_equal(one: Any, other: Any, name: str = "") -> None:
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other), name
    elif isinstance(one, (Mamba2Metadata, Mamba2Metadata.MixedMetadata)):
        assert type(one) is type(other)
        for field in fields(one):
            mine, theirs = getattr(one, field.name), getattr(other, field.name)
            assert_equal(mine, theirs, field.name)
    else:
        assert one == other and type(one) is type(other), name


CHUNK = st.sampled_from([1, 4, 8, 256])
LENGTH = st.one_of(st.integers(1, 40), st.sampled_from([1, 8, 16, 256, 512, 513]))
REQUESTS = st.lists(
    st.tuples(LENGTH, st.one_of(st.just(0), st.integers(1, 99))), min_size=1, max_size=9
)


@settings(deadline=None)
@given(REQUESTS, CHUNK)
@example([(1, 0), (1, 7), (1, 0), (6, 8)], 8)
@example([(8, 1), (8, 0), (16, 3)], 8)
@example([(5, 0), (5, 0)], 8)
@example([(1, 1)] * 9, 4)
def test_the_metadata_is_sglang_s_own(
    requests: list[tuple[int, int]], chunk: int
) -> None:
    metadata, batch = batch_of(requests)
    found = prepare_mixed(refuse, Mamba2Metadata, metadata, chunk, batch)
    expected = original(Mamba2Metadata, readable(metadata), chunk, readable(batch))
    mixed = found.mixed_metadata
    mixed = Mamba2Metadata.MixedMetadata(
        **{field.name: readable(getattr(mixed, field.name)) for field in fields(mixed)}
    )
    found = readable(found)
    found.mixed_metadata = mixed
    assert_equal(found, expected)


@settings(deadline=None)
@given(st.lists(LENGTH, min_size=1, max_size=9), CHUNK)
def test_a_chunk_is_of_one_sequence_and_between_two_multiples(
    lengths: list[int], chunk: int
) -> None:
    starts = chunk_starts(lengths, chunk).tolist()
    sequence = [n for n, length in enumerate(lengths) for _ in range(length)]
    chunks = [(token // chunk, owner) for token, owner in enumerate(sequence)]
    first = [n for n in range(len(chunks)) if n == 0 or chunks[n] != chunks[n - 1]]
    assert starts == first


def test_sglang_s_own_method_reads_the_device() -> None:
    metadata, batch = batch_of([(5, 3), (5, 0)])
    with pytest.raises(AssertionError, match="of a tensor on the device"):
        original(Mamba2Metadata, metadata, 8, batch)


def test_each_part_of_the_upload_is_aligned() -> None:
    metadata, batch = batch_of([(5, 3), (9, 0), (1, 1)])
    mixed = prepare_mixed(refuse, Mamba2Metadata, metadata, 8, batch).mixed_metadata
    parts = mixed.chunk_indices, mixed.chunk_offsets, mixed.seq_idx
    (storage,) = {part.untyped_storage().data_ptr() for part in parts}
    assert [part.data_ptr() % 16 for part in parts] == [storage % 16] * 3


@pytest.mark.parametrize(
    "changes",
    [
        {"extend_num_tokens": None},
        {"logical_forward_mode": ForwardMode.DECODE},
        {"spec_info": SimpleNamespace(draft_token_num=2)},
        {"extend_seq_lens_cpu": None},
        {"extend_prefix_lens_cpu": None},
        {"extend_prefix_lens_cpu": [3]},
        {"extend_seq_lens_cpu": [5, 0]},
    ],
)
def test_other_batches_are_left_to_sglang(changes: dict[str, Any]) -> None:
    metadata, batch = batch_of([(5, 3), (5, 0)], **changes)

    def sglang(*args: Any) -> str:
        assert args == (Mamba2Metadata, metadata, 8, batch)
        return "SGLang's"

    assert prepare_mixed(sglang, Mamba2Metadata, metadata, 8, batch) == "SGLang's"


def test_tracked_states_are_left_to_sglang() -> None:
    metadata, batch = batch_of([(5, 3)])
    metadata.has_mamba_track_mask = True
    assert prepare_mixed(lambda *_: 1, Mamba2Metadata, metadata, 8, batch) == 1


@pytest.mark.parametrize("ours", [True, False])
def test_only_where_our_cache_serves(
    ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks: list[Any] = []
    monkeypatch.setattr(patches, "_hook", lambda *hook: hooks.append(hook))
    monkeypatch.setattr(patches, "_is_ours", lambda: ours)
    patches._find_chunks_on_the_host()
    ((target, kind, hook),) = hooks
    assert target.endswith("Mamba2Metadata.prepare_mixed") and kind == "AROUND"
    metadata, batch = batch_of([(5, 3), (5, 0)])
    found = hook(lambda *_: "SGLang's", Mamba2Metadata, metadata, 8, batch)
    assert (found == "SGLang's") is not ours
