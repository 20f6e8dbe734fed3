# SPDX-License-Identifier: Apache-2.0
"""What a folder finds, keeps and gives back."""

from __future__ import annotations

import logging
import os
import stat
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from hybrid_plugin.core.tiers.outer_tier import StoredBundle
from hybrid_plugin.errors import ConfigError
from hybrid_plugin.tiers.bundle import Layouts, PageBytes
from hybrid_plugin.tiers.failure import Failure, Reason
from hybrid_plugin.tiers.files import AnybodysFiles, Files
from hybrid_plugin.tiers.keys import BundleName
from hybrid_plugin.tiers.manifest import Manifest
from hybrid_plugin.tiers.shelf import SUFFIX
from tests.tiers.one_rank import OneRank
from tests.tiers.support import (
    IDENTITY,
    Unsynced,
    as_tokens,
    bundle,
    check_loaded,
    layouts,
    load_path,
    store_path,
)

BUDGET = 1 << 20
FILE = 4300
"""At least the bytes of a bundle of a few tokens."""
TOKENS = as_tokens(*range(100, 140))


def opened(path: Path, own: Layouts, budget: int = BUDGET, **more: object) -> OneRank:
    files = Unsynced()
    return OneRank(path, budget, IDENTITY, own, files=files, **more)  # type: ignore[arg-type]


def file_key(stored: StoredBundle) -> str:
    return BundleName.from_text(stored.key).key


def ends(folder: OneRank, tokens: object = TOKENS, namespace: object = None) -> object:
    found = folder.find(namespace, tokens)  # type: ignore[arg-type]
    return found and [one.end for one in found.path]


@pytest.mark.parametrize("windows", [False, True])
def test_gives_back_what_was_stored(tmp_path: Path, windows: bool) -> None:
    own = layouts(windows=windows)
    folder = opened(tmp_path, own)
    assert all(
        isinstance(m, Manifest) for m in store_path(folder, own, None, TOKENS, 6, 9, 33)
    )
    found = folder.find(None, TOKENS)
    assert found is not None and found.end == 33
    check_loaded(load_path(folder, own, TOKENS, found), own, None, TOKENS, 33)


def test_finds_the_longest_prefix_that_leaves_a_token(tmp_path: Path) -> None:
    own = layouts()
    folder = opened(tmp_path, own)
    store_path(folder, own, None, TOKENS, 6, 9, 33)
    assert ends(folder) == [6, 9, 33]
    assert ends(folder, TOKENS[:33]) == [6, 9]
    assert ends(folder, TOKENS[:9]) == [6]
    assert ends(folder, TOKENS[:6]) is None
    found = folder.find(None, TOKENS[:9], limit=9)
    assert found is not None and found.end == 9
    other = as_tokens(*TOKENS[:8], 7, *TOKENS[9:])
    assert ends(folder, other) == [6]


def test_finds_bundles_beyond_whole_chunks_of_tokens(tmp_path: Path) -> None:
    own = layouts(16)
    folder = opened(tmp_path, own)
    tokens = as_tokens(*range(1100))
    store_path(folder, own, None, tokens, 255, 256, 257, 512, 700, 1024)
    assert ends(folder, tokens) == [255, 256, 257, 512, 700, 1024]
    assert ends(folder, tokens[:1024]) == [255, 256, 257, 512, 700]
    assert ends(folder, tokens[:512]) == [255, 256, 257]
    assert ends(folder, tokens[:257]) == [255, 256]
    assert ends(folder, tokens[:256]) == [255]


def test_branches_share_what_comes_before(tmp_path: Path) -> None:
    own = layouts()
    folder = opened(tmp_path, own)
    left, right = TOKENS, as_tokens(*TOKENS[:10], *range(30))
    store_path(folder, own, None, left, 10, 20)
    assert isinstance(folder.store(bundle(own, None, right[:25], 10)), Manifest)
    for tokens, end in ((left, 20), (right, 25)):
        found = folder.find(None, tokens)
        assert found is not None and [m.end for m in found.path] == [10, end]
        check_loaded(load_path(folder, own, tokens, found), own, None, tokens, end)


@pytest.mark.parametrize(
    "other", ["", "a", ("a", None), (None, "a"), ("a", "b"), ("ab", None)]
)
def test_namespaces_are_apart(tmp_path: Path, other: object) -> None:
    own = layouts()
    folder = opened(tmp_path, own)
    store_path(folder, own, None, TOKENS, 6)
    assert ends(folder, namespace=other) is None
    store_path(folder, own, other, TOKENS, 8)  # type: ignore[arg-type]
    assert ends(folder, namespace=other) == [8]
    assert ends(folder) == [6]


def test_a_namespace_of_nothing_is_none(tmp_path: Path) -> None:
    own = layouts()
    folder = opened(tmp_path, own)
    store_path(folder, own, None, TOKENS, 6)
    assert ends(folder, namespace=(None, None)) == [6]


def test_survives_a_restart(tmp_path: Path) -> None:
    own = layouts()
    folder = opened(tmp_path, own)
    store_path(folder, own, "salt", TOKENS, 6, 9, 33)
    used = folder.used_bytes
    folder.close()
    folder = opened(tmp_path, own)
    assert (
        folder.used_bytes
        == used
        == sum(file.stat().st_size for file in folder.path.glob("*" + SUFFIX))
    )
    found = folder.find("salt", TOKENS)
    assert found is not None and found.end == 33
    check_loaded(load_path(folder, own, TOKENS, found), own, "salt", TOKENS, 33)


@pytest.mark.parametrize("page", [1, 3, 4, 5, 16, 64])
@pytest.mark.parametrize("heads_first", [False, True])
def test_another_layout_reads_it(tmp_path: Path, page: int, heads_first: bool) -> None:
    written = layouts(windows=True)
    folder = opened(tmp_path, written)
    store_path(folder, written, None, TOKENS, 6, 9, 33)
    folder.close()
    own = layouts(page, windows=True, heads_first=heads_first, padding=8)
    folder = opened(tmp_path, own)
    found = folder.find(None, TOKENS)
    assert found is not None and found.end == 33
    check_loaded(load_path(folder, own, TOKENS, found), own, None, TOKENS, 33)


def test_the_safetensors_library_reads_it(tmp_path: Path) -> None:
    own = layouts()
    folder = opened(tmp_path, own)
    made = bundle(own, None, TOKENS[:9], 0)
    folder.store(made)
    (file,) = folder.path.glob("*" + SUFFIX)
    with safe_open(file, "np") as read:
        assert read.metadata()["format"] == "hybrid-bundle/1"
        assert np.array_equal(read.get_tensor("kv"), np.stack(made.pages["kv"].rows))
        assert np.array_equal(read.get_tensor("state"), made.state)
        assert read.get_tensor("tokens").tolist() == TOKENS[:9].tolist()
    length = int.from_bytes(file.read_bytes()[:8], "little")
    assert (length + 8) % 4096 == 0


def test_files_are_private_and_complete(tmp_path: Path) -> None:
    own = layouts()
    folder = OneRank(tmp_path / "a" / "b", BUDGET, IDENTITY, own)  # and synced
    store_path(folder, own, None, TOKENS, 6, 9)
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    for file in folder.path.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    names = sorted(file.suffix for file in folder.path.iterdir())
    assert names == ["", SUFFIX, SUFFIX]  # and the lock


def test_others_may_not_write_into_it(tmp_path: Path) -> None:
    (tmp_path / IDENTITY.rank_name).mkdir(mode=0o700)
    (tmp_path / IDENTITY.rank_name).chmod(0o770)
    with pytest.raises(ConfigError, match="others may write"):
        opened(tmp_path, layouts())


def test_what_another_user_wrote_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who may rename the rank's folder can put another in its place at any time."""
    own = layouts()
    folder = opened(tmp_path, own)
    (stored,) = store_path(folder, own, None, TOKENS, 6)
    assert isinstance(stored, Manifest)
    found, path = folder.find(None, TOKENS), folder.path / (stored.key + SUFFIX)
    assert found is not None
    another = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: another)
    with pytest.raises(PermissionError, match="another user wrote it"):
        Files().open(path)
    os.close(AnybodysFiles().open(path))
    lost = load_path(folder, own, TOKENS, found)
    assert isinstance(lost, Failure) and lost.reason is Reason.IO


def test_one_process_at_a_time(tmp_path: Path) -> None:
    folder = opened(tmp_path, layouts())
    with pytest.raises(ConfigError, match="in use by another process"):
        opened(tmp_path, layouts())
    folder.close()
    opened(tmp_path, layouts()).close()


def test_a_stored_bundle_is_not_written_again(tmp_path: Path) -> None:
    own = layouts()
    folder = opened(tmp_path, own)
    first = folder.store(bundle(own, None, TOKENS[:9]))
    (file,) = folder.path.glob("*" + SUFFIX)
    inode = file.stat().st_ino
    assert isinstance(first, Manifest)
    assert folder.store(bundle(own, None, TOKENS[:9])) is None
    assert file.stat().st_ino == inode


def test_nothing_is_stored_behind_a_gap(tmp_path: Path) -> None:
    own = layouts()
    folder = opened(tmp_path, own)
    assert folder.store(bundle(own, None, TOKENS[:9], 6)) is None
    assert not list(folder.path.glob("*" + SUFFIX))


def test_what_follows_a_lost_bundle_is_found_again_with_it(tmp_path: Path) -> None:
    own = layouts()
    folder = opened(tmp_path, own)
    store_path(folder, own, None, TOKENS, 6, 9, 33)
    middle = folder.find(None, TOKENS[:10])
    assert middle is not None
    (folder.path / (file_key(middle.path[-1]) + SUFFIX)).unlink()
    found = folder.find(None, TOKENS)
    assert found is not None and found.end == 33
    lost = load_path(folder, own, TOKENS, found)
    assert isinstance(lost, Failure) and lost.reason is Reason.MISSING
    assert ends(folder) == [6]
    folder.store(bundle(own, None, TOKENS[:9]))  # of other boundaries
    found = folder.find(None, TOKENS)
    assert found is not None and [m.end for m in found.path] == [9, 33]
    check_loaded(load_path(folder, own, TOKENS, found), own, None, TOKENS, 33)


def test_the_least_recently_used_goes_first_and_leaves_before_parents(
    tmp_path: Path,
) -> None:
    own = layouts()
    folder = opened(tmp_path, own, budget=3 * FILE)
    a, b, c = (as_tokens(*range(n, n + 20)) for n in (0, 100, 200))
    store_path(folder, own, None, a, 8, 16)
    store_path(folder, own, None, b, 8)
    used = folder.find(None, a)
    assert used is not None and used.end == 16
    load_path(folder, own, a, used)
    store_path(folder, own, None, c, 8)  # b goes
    assert (ends(folder, a), ends(folder, b), ends(folder, c)) == ([8, 16], None, [8])
    store_path(folder, own, None, c, 8, 16)  # the end of a goes, not its beginning
    assert (ends(folder, a), ends(folder, c)) == ([8], [8, 16])
    assert folder.used_bytes <= 3 * FILE
    assert folder.count == len(list(folder.path.glob("*" + SUFFIX))) == 3


def test_the_order_survives_a_restart(tmp_path: Path) -> None:
    own = layouts()
    a, b, c = (as_tokens(*range(n, n + 20)) for n in (0, 100, 200))
    folder = opened(tmp_path, own)
    store_path(folder, own, None, a, 8, 16)
    store_path(folder, own, None, b, 8)
    found = folder.find(None, a)
    assert found is not None
    load_path(folder, own, a, found)
    folder.close()
    folder = opened(tmp_path, own, budget=folder.used_bytes)
    store_path(folder, own, None, c, 8)
    assert (ends(folder, a), ends(folder, b), ends(folder, c)) == ([8, 16], None, [8])


def test_a_smaller_budget_evicts_at_the_start(tmp_path: Path) -> None:
    own = layouts()
    folder = opened(tmp_path, own)
    store_path(folder, own, None, TOKENS, 6, 9, 33)
    used = folder.used_bytes
    folder.close()
    folder = opened(tmp_path, own, budget=used - 1)
    assert ends(folder) == [6, 9]
    assert folder.used_bytes <= used - 1


def test_what_can_never_fit_evicts_nothing(tmp_path: Path) -> None:
    own = layouts()
    folder = opened(tmp_path, own, budget=3 * 4096)
    store_path(folder, own, None, TOKENS, 6)
    assert folder.store(bundle(own, None, as_tokens(*range(2000)))) is None
    longer = as_tokens(*TOKENS[:6], *range(400))
    assert folder.store(bundle(own, None, longer, 6)) is None
    assert ends(folder) == [6]


@pytest.mark.parametrize(
    "changed",
    [
        {"weights": "other"},
        {"config": "1" * 64},
        {"layers": ("0 full", "1 gdn")},
        {"kv_dtype": "fp8"},
        {"update": "1"},
    ],
)
def test_other_models_find_nothing_and_share_the_room(
    tmp_path: Path, changed: dict[str, object]
) -> None:
    own = layouts()
    folder = opened(tmp_path, own)
    store_path(folder, own, None, TOKENS, 6, 9)
    folder.close()
    other = replace(IDENTITY, **changed)  # type: ignore[arg-type]
    folder = OneRank(tmp_path, 2 * FILE, other, own, files=Unsynced())
    assert (ends(folder), folder.count) == (None, 2)
    store_path(folder, own, None, TOKENS, 6)
    assert (ends(folder), folder.count) == ([6], 2)


def test_each_rank_has_a_folder(tmp_path: Path) -> None:
    own = layouts()
    store_path(opened(tmp_path, own), own, None, TOKENS, 6)
    for ranks in ({"tensor_ranks": 2}, {"tensor_ranks": 2, "tensor_rank": 1}):
        other = OneRank(
            tmp_path, BUDGET, replace(IDENTITY, **ranks), own, files=Unsynced()
        )
        assert other.count == 0
    assert len(list(tmp_path.iterdir())) == 3


def test_ranks_have_one_key_and_refuse_each_others_parts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = layouts()
    ranks = [replace(IDENTITY, tensor_ranks=2, tensor_rank=rank) for rank in (0, 1)]
    folders = [OneRank(tmp_path, BUDGET, rank, own, files=Unsynced()) for rank in ranks]
    parts = [store_path(folder, own, None, TOKENS, 6)[0] for folder in folders]
    assert isinstance(parts[0], Manifest) and isinstance(parts[1], Manifest)
    assert parts[0].key == parts[1].key
    name = parts[0].key + SUFFIX
    (folders[0].path / name).write_bytes((folders[1].path / name).read_bytes())
    found = folders[0].find(None, TOKENS)
    assert found is not None
    lost = load_path(folders[0], own, TOKENS, found)
    assert isinstance(lost, Failure) and lost.reason is Reason.REPLACED
    (folders[0].path / name).write_bytes((folders[1].path / name).read_bytes())
    folders[0].close()
    assert OneRank(tmp_path, BUDGET, ranks[0], own, files=Unsynced()).count == 0
    assert "it is rank-1-of-2's" in caplog.text


def test_a_file_of_another_model_in_our_place_is_a_miss(tmp_path: Path) -> None:
    own = layouts()
    other = OneRank(
        tmp_path / "o", BUDGET, replace(IDENTITY, update="1"), own, files=Unsynced()
    )
    folder = opened(tmp_path / "a", own)
    (theirs,) = store_path(other, own, None, TOKENS, 6)
    (ours,) = store_path(folder, own, None, TOKENS, 6)
    assert isinstance(ours, Manifest) and isinstance(theirs, Manifest)
    os.replace(other.path / (theirs.key + SUFFIX), folder.path / (ours.key + SUFFIX))
    found = folder.find(None, TOKENS)
    assert found is not None
    lost = load_path(folder, own, TOKENS, found)
    assert isinstance(lost, Failure) and lost.reason is Reason.REPLACED
    assert ends(folder) is None and not list(folder.path.glob("*" + SUFFIX))


def test_tokens_count_not_their_hash(tmp_path: Path) -> None:
    own = layouts()
    folder = opened(tmp_path, own)
    store_path(folder, own, None, TOKENS, 6)
    found = folder.find(None, TOKENS)
    assert found is not None
    lost = load_path(folder, own, as_tokens(*TOKENS[:5], 0, 0), found)
    assert isinstance(lost, Failure) and lost.reason is Reason.OTHER_TOKENS


def test_what_cannot_be_converted_is_not_found_and_replaced(tmp_path: Path) -> None:
    written = layouts()
    folder = opened(tmp_path, written)
    store_path(folder, written, None, TOKENS, 6)
    folder.close()
    own = layouts(windows=True)
    folder = opened(tmp_path, own)
    assert (ends(folder), folder.count) == (None, 1)
    store_path(folder, own, None, TOKENS, 6)
    assert (ends(folder), folder.count) == ([6], 1)


def test_memory_of_another_size_is_an_error(tmp_path: Path) -> None:
    own = layouts()
    folder = opened(tmp_path, own)
    store_path(folder, own, None, TOKENS, 6)
    found = folder.find(None, TOKENS)
    assert found is not None
    rows = PageBytes(0, [np.zeros(32, np.uint8)])
    with pytest.raises(ValueError, match="takes 2 rows"):
        folder.load(found.path, TOKENS, [{"kv": rows}], None)


def test_the_state_may_stay_in_the_file(tmp_path: Path) -> None:
    own = layouts()
    folder = opened(tmp_path, own)
    store_path(folder, own, None, TOKENS, 6)
    found = folder.find(None, TOKENS)
    assert found is not None
    rows = np.zeros((2, 32), np.uint8)
    assert folder.load(found.path, TOKENS, [{"kv": PageBytes(0, [rows])}], None) is None
    assert rows.any()


def test_a_flush_leaves_other_models_alone(tmp_path: Path) -> None:
    own = layouts()
    other = OneRank(
        tmp_path, BUDGET, replace(IDENTITY, update="1"), own, files=Unsynced()
    )
    store_path(other, own, None, TOKENS, 6)
    other.close()
    folder = opened(tmp_path, own)
    store_path(folder, own, None, TOKENS, 6, 9)
    folder.clear()
    assert (ends(folder), folder.count) == (None, 1)


def test_unfinished_files_are_removed_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = layouts()
    folder = opened(tmp_path, own)
    store_path(folder, own, None, TOKENS, 6)
    folder.close()
    (folder.path / ("0" * 64 + ".unfinished")).write_bytes(b"half")
    (folder.path / ("0" * 64 + SUFFIX)).write_bytes(b"rubbish")
    (folder.path / "notes.txt").write_text("mine")
    with caplog.at_level(logging.WARNING):
        folder = opened(tmp_path, own)
    assert len(caplog.records) == 1
    assert ends(folder) == [6]
    assert sorted(file.name for file in folder.path.iterdir())[1:] == sorted(
        [*(f.name for f in folder.path.glob("*" + SUFFIX)), "notes.txt"]
    )
    assert folder.count == 1


def test_a_flush_counts_for_what_is_being_stored(tmp_path: Path) -> None:
    own = layouts()
    folder = opened(tmp_path, own)
    store_path(folder, own, None, TOKENS, 6)
    storing = folder.tier.begin_store(None, TOKENS[:9], 6, 3 * 32)
    assert storing is not None
    folder.clear()
    assert (ends(folder), folder.count) == (None, 1)  # it counts for the size
    folder.shelf.discard(folder.tier.store_failed(storing.key, "flushed"))
    assert (ends(folder), folder.count, folder.used_bytes) == (None, 0, 0)
    assert isinstance(folder.store(bundle(own, None, TOKENS[:6])), Manifest)
    assert (ends(folder), folder.count) == ([6], 1)


def test_what_failed_behind_the_rename_leaves_nothing(tmp_path: Path) -> None:
    own = layouts()
    folder = opened(tmp_path, own)

    class Broken(Unsynced):
        def sync_folder(self, folder: Path) -> None:
            raise OSError(5, "Input/output error")

    folder.shelf.files = Broken()
    result = folder.store(bundle(own, None, TOKENS[:9]))
    assert isinstance(result, Failure) and result.reason is Reason.IO
    assert [file.name for file in folder.path.iterdir()] == [".lock"]
    assert (ends(folder), folder.used_bytes) == (None, 0)


def test_a_full_disk_takes_nothing_until_it_has_room(tmp_path: Path) -> None:
    own = layouts()
    folder = opened(tmp_path, own)

    class Full(Unsynced):
        def free_bytes(self, folder: Path) -> int:
            return 100

    folder.shelf.files = Full()
    result = folder.store(bundle(own, None, TOKENS[:9]))
    assert isinstance(result, Failure) and result.reason is Reason.DISK_FULL
    assert (ends(folder), folder.used_bytes) == (None, 0)
    folder.shelf.files = Unsynced()
    assert isinstance(folder.store(bundle(own, None, TOKENS[:9])), Manifest)


def test_what_can_be_neither_read_nor_removed_is_not_found_again(
    tmp_path: Path,
) -> None:
    own = layouts()
    folder = opened(tmp_path, own)
    store_path(folder, own, None, TOKENS, 6, 9)

    class Stuck(Unsynced):
        def open(self, path: Path) -> int:
            raise PermissionError(13, "Permission denied")

        def remove(self, path: Path) -> None:
            raise PermissionError(13, "Permission denied")

    found = folder.find(None, TOKENS)
    assert found is not None
    folder.shelf.files = Stuck()
    lost = load_path(folder, own, TOKENS, found)
    assert isinstance(lost, Failure) and lost.reason is Reason.IO
    assert ends(folder) is None
    again = bundle(own, None, TOKENS[:6])
    for files, stored in ((Stuck(), Failure), (Unsynced(), Manifest)):
        folder.shelf.files = files
        assert isinstance(folder.store(again), stored)
    assert ends(folder) == [6, 9]
