# SPDX-License-Identifier: Apache-2.0
"""The oracle of `oracle_vllm` for vLLM's V2 model runner, which drafts on the device.

A plugin of vLLM (`faults` has its entry point): where HYBRID_TEST_ORACLE names a file,
"ngram_gpu" proposes what the file says.  The V2 runner always takes as many drafts as
it is configured for, so "ragged" is like "some" there.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from tests.engines.oracle_vllm import FILE

NOTHING = -1


def register() -> None:
    """Replace what "ngram_gpu" proposes, where a test asks for it."""
    if FILE not in os.environ or not torch.cuda.is_available():
        return
    from vllm.v1.worker.gpu.spec_decode.ngram import speculator

    class Oracle(speculator.NgramGPUSpeculator):  # type: ignore[misc]
        known: Known | None = None

        def propose(self, input_batch: Any, *args: Any, **more: Any) -> torch.Tensor:
            drafts: torch.Tensor = self.drafts[: input_batch.num_reqs]
            if more.get("dummy_run"):
                return drafts
            if self.known is None:
                self.known = Known(Path(os.environ[FILE]), self.device)
            rows = input_batch.idx_mapping[: input_batch.num_reqs].long()
            texts = self.req_states.all_token_ids.gpu[rows]
            lengths = self.req_states.total_len.gpu[rows].long()
            drafts.copy_(self.known.drafts(texts, lengths, drafts.shape[1]))
            return drafts

    speculator.NgramGPUSpeculator = Oracle


class Known:
    """What sequences will say, on the device."""

    def __init__(self, path: Path, device: torch.device) -> None:
        """Read the file that `oracle_vllm.write` wrote."""
        entries = json.loads(path.read_text())
        self._lengths = torch.tensor(
            [len(one["tokens"]) for one in entries], device=device
        )
        longest = max(len(one["tokens"]) for one in entries)
        self._tokens = torch.tensor(
            [
                one["tokens"] + [NOTHING] * (longest - len(one["tokens"]))
                for one in entries
            ],
            device=device,
        )
        modes = [one["mode"] for one in entries]
        self._none = torch.tensor([mode == "none" for mode in modes], device=device)
        self._all = torch.tensor([mode == "all" for mode in modes], device=device)

    def drafts(
        self, texts: torch.Tensor, lengths: torch.Tensor, most: int
    ) -> torch.Tensor:
        """Drafts of each row, some right and the rest wrong.

        Args:
            texts: ``[N, L]``, tokens so far.
            lengths: ``[N]``, how many of them there are.
            most: drafts of a row.

        Returns:
            ``[N, most]``; wrong ones where nothing is known.
        """
        width = min(texts.shape[1], self._tokens.shape[1])
        place = torch.arange(width, device=texts.device)
        behind = place >= lengths[:, None]
        alike = self._tokens[None, :, :width] == texts[:, None, :width]
        found = (alike | behind[:, None]).all(-1)
        found &= self._lengths[None] > lengths[:, None]
        entry = found.int().argmax(1)
        steps = torch.arange(most, device=texts.device)
        reach = (lengths[:, None] + steps).clamp(max=self._tokens.shape[1] - 1)
        coming = self._tokens[entry[:, None], reach]
        right = (lengths * 2654435761 >> 7) % (most + 1)
        right = torch.where(self._all[entry], most, right)
        right = torch.where(self._none[entry] | ~found.any(1), 0, right)
        known = coming != NOTHING
        wrong = torch.where(known, coming ^ 1, 1)
        return torch.where(known & (steps < right[:, None]), coming, wrong)
