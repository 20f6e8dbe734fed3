# SPDX-License-Identifier: Apache-2.0
"""Headers: read back as written, and nothing else is taken for one."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load

from hybrid_plugin.tiers import header
from hybrid_plugin.tiers.bundle_file import checksum, reading, write
from hybrid_plugin.tiers.failure import Failure, Reason
from hybrid_plugin.tiers.files import Files
from hybrid_plugin.tiers.manifest import Manifest, Run
from hybrid_plugin.tiers.row_layout import RowLayout
from tests.tiers.support import STATE, Unsynced, page_layout

DIGESTS = st.text("0123456789abcdef", min_size=64, max_size=64)
SUM = "0" * 32


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    start = draw(st.integers(0, 5000))
    end = draw(st.integers(start + 1, 6000))
    pools = draw(
        st.lists(st.sampled_from(["kv", "window0", "wind\ud800ow"]), unique=True)
    )
    runs = tuple(
        Run(pool, draw(st.integers(0, end)), page_layout(draw(st.integers(1, 64))))
        for pool in pools
    )
    state = draw(st.sampled_from([None, STATE, RowLayout(48, 0, opaque='a "b"\n')]))
    return Manifest(
        key=draw(DIGESTS),
        parent=draw(DIGESTS) if start else "",
        anchor=draw(DIGESTS),
        fingerprint=draw(DIGESTS),
        rank="rank-1-of-2",
        start=start,
        end=end,
        runs=runs,
        state=state,
        checksums=(SUM,) * (len(runs) + (state is not None) + 1),
    )


SMALL = Manifest(
    key="1" * 64,
    parent="2" * 64,
    anchor="3" * 64,
    fingerprint="4" * 64,
    rank="rank-0-of-1",
    start=5,
    end=9,
    runs=(Run("kv", 5, page_layout(4)),),
    state=STATE,
    checksums=(SUM, SUM, SUM),
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(manifests())
def test_manifests_come_back(manifest: Manifest) -> None:
    made = header.encode(manifest)
    assert len(made) % header.ALIGNMENT == 0
    assert header.total_length(made[:8], len(made)) == len(made)
    assert header.decode(made) == manifest


def test_no_bit_of_a_header_can_flip() -> None:
    made = header.encode(SMALL)
    rng = random.Random(0)
    for place in range(len(made)):
        flipped = bytearray(made)
        flipped[place] ^= 1 << rng.randrange(8)
        length = header.total_length(bytes(flipped), len(made))
        read = length if isinstance(length, Failure) else header.decode(bytes(flipped))
        assert isinstance(read, Failure), place


JSON: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["9" * 64, 10**30, -1, 2**63]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner)
    ),
    max_leaves=8,
)


def _replace_somewhere(value: Any, new: Any, choose: random.Random) -> Any:
    """The value with one of its parts, however deep, exchanged."""
    if isinstance(value, dict) and value and choose.random() < 0.9:
        key = choose.choice(sorted(value))
        return {**value, key: _replace_somewhere(value[key], new, choose)}
    if isinstance(value, list) and value and choose.random() < 0.9:
        place = choose.randrange(len(value))
        changed = _replace_somewhere(value[place], new, choose)
        return [*value[:place], changed, *value[place + 1 :]]
    return new


@settings(max_examples=400, deadline=None, derandomize=True)
@given(JSON, st.integers(0, 10_000))
def test_whatever_a_header_says_it_is_a_value(new: Any, seed: int) -> None:
    """Whoever makes a header with right checksums still makes no exception, and no
    manifest that contradicts itself."""
    choose = random.Random(seed)
    made = json.loads(header.encode(SMALL)[8:])
    metadata = made["__metadata__"]
    name = choose.choice(["manifest", "layout.kv", "layout.state", ""])
    if name:
        inner = _replace_somewhere(json.loads(metadata[name]), new, choose)
        metadata[name] = json.dumps(inner, separators=(",", ":"))
    else:
        made = _replace_somewhere(made, new, choose)
    texts = metadata if isinstance(metadata, dict) else {}
    signed = {k: v for k, v in texts.items() if k not in ("format", "checksum")}
    texts["checksum"] = xxhash.xxh3_128_hexdigest(json.dumps(signed).encode())
    text = json.dumps(made, separators=(",", ":")).encode()
    length = -(-(8 + len(text)) // 4096) * 4096 - 8
    read = header.decode(length.to_bytes(8, "little") + text.ljust(length))
    if isinstance(read, Manifest):
        assert header.decode(header.encode(read)) == read
        assert read.start < read.end and read.data_bytes >= 0


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b"[]",
        b"3",
        b'{"__metadata__": 3}',
        b'{"__metadata__": {"format": "hybrid-bundle/1"}}',
        b"[" * 100_000,
        b'{"__metadata__": {"format": "hybrid-bundle/1", "manifest": "[[[[[["}}',
        b"\xff\xfe",
    ],
)
def test_rubbish_is_malformed(text: bytes) -> None:
    read = header.decode(len(text).to_bytes(8, "little") + text)
    assert isinstance(read, Failure) and read.reason is Reason.MALFORMED


def test_other_versions_are_told_apart() -> None:
    made = header.encode(SMALL).replace(b"hybrid-bundle/1", b"hybrid-bundle/2")
    read = header.decode(made)
    assert isinstance(read, Failure) and read.reason is Reason.VERSION


@pytest.mark.parametrize("size", [0, 7, 8, 4095])
def test_short_files_are_torn(size: int) -> None:
    read = header.total_length(header.encode(SMALL)[:size], size)
    assert isinstance(read, Failure) and read.reason is Reason.TORN


def test_no_memory_is_taken_for_a_header_that_lies() -> None:
    read = header.total_length((2**62 - 8).to_bytes(8, "little"), 2**63)
    assert isinstance(read, Failure) and read.reason is Reason.MALFORMED


@pytest.mark.parametrize(
    "changes",
    [
        {"start": 9},
        {"start": -1},
        {"start": 0},
        {"end": 1 << 50},
        {"parent": ""},
        {"key": "1" * 63},
        {"key": "../" + "1" * 61},
        {"rank": "rank-0"},
        {"checksums": (SUM, SUM)},
        {"checksums": (SUM, SUM, "0")},
        {"runs": (Run("state", 5, page_layout(4)),)},
        {"runs": (Run("tokens", 5, page_layout(4)),)},
        {"runs": (Run("kv", 5, page_layout(4)), Run("kv", 5, page_layout(4)))},
        {"runs": (Run("kv", 10, page_layout(4)),)},
        {"runs": (Run("kv", 5, STATE),)},
        {"state": page_layout(4)},
    ],
)
def test_manifests_do_not_contradict_themselves(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        replace(SMALL, **changes)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.data())
def test_files_come_back_and_the_library_reads_them(data: st.DataObject) -> None:
    import tempfile

    manifest = data.draw(manifests().filter(lambda m: "wind\ud800ow" not in _pools(m)))
    rng = np.random.default_rng(0)
    tensors = {
        tensor.name: [rng.integers(0, 256, tensor.size, dtype=np.uint8)]
        for tensor in manifest.tensors()
    }
    sums = tuple(checksum(tensors[tensor.name]) for tensor in manifest.tensors())
    manifest = replace(manifest, checksums=sums)
    with tempfile.TemporaryDirectory() as place:
        path = Path(place, "file")
        write(Unsynced(), path, manifest, tensors)
        with reading(Files(), path) as reader:
            assert not isinstance(reader, Failure), reader
            assert reader.manifest == manifest
            assert reader.verify() is None
            for name, (rows,) in tensors.items():
                got = np.zeros_like(rows)
                pieces = np.array_split(got, data.draw(st.integers(1, 5)))
                assert reader.read(name, pieces) is None
                assert np.array_equal(got, rows)
        read = load(path.read_bytes())
        assert {name: value.tobytes() for name, value in read.items()} == {
            name: rows.tobytes() for name, (rows,) in tensors.items()
        }
        path.write_bytes(path.read_bytes()[:-1])
        with reading(Files(), path) as torn:
            assert isinstance(torn, Failure) and torn.reason is Reason.TORN
        with pytest.raises(SafetensorError), safe_open(path, "np"):
            pass


def _pools(manifest: Manifest) -> list[str]:
    return [run.pool for run in manifest.runs]
