# SPDX-License-Identifier: Apache-2.0
"""The oracle of the V2 model runner drafts what sequences will say, and wrongly."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from tests.engines.oracle_vllm_v2 import Known


def test_as_many_drafts_are_right_as_the_mode_says(tmp_path: Path) -> None:
    tokens = {"all": [5, 6, 7, 8, 9], "none": [5, 6, 1, 2, 3], "some": [4] * 40}
    file = tmp_path / "oracle.json"
    file.write_text(
        json.dumps([{"tokens": told, "mode": mode} for mode, told in tokens.items()])
    )
    known = Known(file, torch.device("cpu"))
    texts = torch.full((5, 50), 77)
    for row, said in enumerate(([5, 6, 7], [5, 6, 1], [8], [5, 6, 7, 8, 9], [4] * 39)):
        texts[row, : len(said)] = torch.tensor(said)
    lengths = torch.tensor([3, 3, 1, 5, 39])
    drafts = known.drafts(texts, lengths, 3).tolist()
    assert drafts[0] == [8, 9, 1]
    assert drafts[1] == [3, 2, 1]
    assert drafts[2] == [1, 1, 1] or 5 not in drafts[2]
    assert drafts[3] == [1, 1, 1]  # nothing follows
    counts = set()
    for length in range(1, 30):
        row = known.drafts(texts[4:], torch.tensor([length]), 3)[0].tolist()
        assert row == [4] * row.count(4) + [5] * (3 - row.count(4))
        counts.add(row.count(4))
    assert counts == {0, 1, 2, 3}
