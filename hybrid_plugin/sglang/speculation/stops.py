# SPDX-License-Identifier: Apache-2.0
"""Ends what a verification accepts at a request's first stop, on the device.

SGLang cuts an answer at a stop token or at its length limit when it handles a step's
result.  Under the overlap schedule the next step runs by then, from behind the stop,
and has overwritten the state that belongs to the answer's end.  Nobody sees what is
cut here: SGLang would cut it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from hybrid_kernels import stops
from hybrid_kernels.stops import ROOM, Ends

from hybrid_plugin.device.arena import to_device


class Accepted(NamedTuple):
    """What SGLang's `eagle_sample` returns."""

    predict: torch.Tensor
    """``[drafts of all]``, the token after each draft."""
    lens: torch.Tensor
    """``[N]``, tokens that each sequence gets."""
    path: torch.Tensor
    """``[N, most]``, numbers of the known token and of the drafts; -1 behind them."""


class Stops:
    """Where the requests of a batch stop, kept on the device while the batch stays."""

    def __init__(self) -> None:
        self._reqs: tuple[Any, ...] = ()
        self._tokens = torch.empty(0)
        self._limits = torch.empty(0)
        self._rows = torch.empty(0)

    def cut(
        self, accepted: Accepted, reqs: Sequence[Any], seq_lens: torch.Tensor
    ) -> Accepted:
        """End what was accepted at each request's first stop.

        Args:
            accepted: of the requests.
            reqs: SGLang's.
            seq_lens: ``[N]``, tokens computed before the step.
        """
        if not reqs:
            return accepted
        self._describe(reqs, accepted.lens.device)
        steps = torch.arange(accepted.path.shape[1], device=accepted.lens.device)
        tokens = accepted.predict[accepted.path.clamp(min=0).long()]
        ends = Ends(self._tokens, self._limits, seq_lens)
        # How many drafts are rejected is not asked.
        lens, _ = stops.cut(tokens, accepted.lens, self._rows, self._rows, ends)
        path = accepted.path.masked_fill(steps >= lens[:, None], -1)
        return Accepted(accepted.predict, lens, path)

    def _describe(self, reqs: Sequence[Any], device: torch.device) -> None:
        if tuple(map(id, reqs)) == tuple(map(id, self._reqs)):
            return
        tokens = [sorted(stop_tokens(req)) for req in reqs]
        room = max(ROOM, *map(len, tokens))
        rows = [stops.filled(row, room) for row in tokens]
        limits = [
            len(req.origin_input_ids) + req.sampling_params.max_new_tokens
            for req in reqs
        ]
        self._tokens = to_device(torch.tensor(rows), device)
        self._limits = to_device(torch.tensor(limits), device)
        self._rows = torch.arange(len(reqs), device=device)
        self._reqs = tuple(reqs)  # so that no other one gets the address of these


def stop_tokens(req: Any) -> set[int]:
    """Tokens that end a request's answer, as SGLang's `Req` finds them."""
    params, tokenizer = req.sampling_params, req.tokenizer
    if params.ignore_eos:
        return set()
    found: set[int] = set()
    wanted: Iterable[Any] = (params.stop_token_ids, req.eos_token_ids)
    if tokenizer is not None:
        wanted = (*wanted, tokenizer.additional_stop_token_ids)
        if tokenizer.eos_token_id is not None:
            found.add(tokenizer.eos_token_id)
    for ids in wanted:
        found |= set(ids or ())
    return found
