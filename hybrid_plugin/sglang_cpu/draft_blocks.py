# SPDX-License-Identifier: Apache-2.0
"""Draft models that propose a block of tokens at once: DFLASH and DSPARK, on a CPU.

Their workers ask for a GPU where others ask their platform.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

_APPLIED = "_hybrid_plugin_original"
_BACKEND = "torch_native"


class _NamedOtherwise:
    """Arguments of a server, but for the name of its device."""

    def __init__(self, view: Any, device: str) -> None:
        self._view, self.device = view, device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)


def take_dspark() -> None:
    """Symptom: with DSPARK a server does not start, "only supports CUDA, NPU or XPU".

    Cause: what checks its arguments knows devices by name, and asks no platform.
    Fix: while it checks them, the device of this platform has one of these names.
    Delete when: `_handle_dspark` asks `supports_speculative_algorithm`, as
    `_handle_dflash` does.
    """
    from sglang.srt.arg_groups import speculative_hook

    original = speculative_hook._handle_dspark
    if hasattr(original, _APPLIED):
        return

    @functools.wraps(original)
    def handle(server_args: Any) -> None:
        view = speculative_hook.resolving_view
        speculative_hook.resolving_view = lambda given: _NamedOtherwise(
            view(given), "xpu"
        )
        try:
            original(server_args)
        finally:
            speculative_hook.resolving_view = view

    setattr(handle, _APPLIED, original)
    speculative_hook._handle_dspark = handle


def attend_in_torch() -> None:
    """Symptom: a draft model for blocks does not start, for want of flashinfer.

    Cause: backends that such models may have are a list, and PyTorch's attention is
    not on it.
    Fix: put it there; SGLang lets platforms do so.
    Delete when: it is on the list.
    """
    from sglang.srt.arg_groups.choices import (
        DRAFT_ATTENTION_BACKEND_CHOICES,
        add_draft_attention_backend_choices,
    )

    if _BACKEND not in DRAFT_ATTENTION_BACKEND_CHOICES:
        add_draft_attention_backend_choices([_BACKEND])


def embed_in_the_models_type() -> None:
    """Symptom: in float32 a block of drafts fails, "expected m1 and m2 to have the same
    dtype".

    Cause: embeddings that a model is given, as this draft model is by its target, are
    made bfloat16 whatever its type is.
    Fix: give it those that came, in its type.
    Delete when: `ModelRunner` converts to the model's type.
    """
    from sglang.srt.model_executor.model_runner import ModelRunner

    original = ModelRunner._extend_forward_kwargs
    if hasattr(original, _APPLIED):
        return

    @functools.wraps(original)
    def arguments(self: Any, forward_batch: Any, *args: Any) -> dict[str, Any]:
        found: dict[str, Any] = original(self, forward_batch, *args)
        given = forward_batch.input_embeds
        if given is not None and forward_batch.replace_embeds is None:
            found["input_embeds"] = given.to(self.dtype)
        return found

    setattr(arguments, _APPLIED, original)
    ModelRunner._extend_forward_kwargs = arguments


def sample_blocks() -> None:
    """Symptom: with a temperature, blocks of DFLASH are accepted as greedy ones, and
    answers are not distributed as the model says.

    Cause: off GPUs SGLang has no function that samples, looks for it once, and goes on
    without.
    Fix: ours is there; `MISSING_NAMES` has put it there.
    Delete when: SGLang ships a PyTorch form.
    """
    from sglang.srt.speculative import dflash_utils

    dflash_utils._DFLASH_SAMPLING_VERIFY_AVAILABLE = True


def accept_chain(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    threshold_single: float,
    threshold_acc: float,
    deterministic: bool = True,
    *,
    block_verification: bool = False,
) -> None:
    """Follow each chain by chance: what comes out is distributed as the model says.

    A draft that was drawn from `q` is kept with probability ``p / q``; behind the first
    one that is not, the next token is drawn from what `p` has beyond `q`.

    Args:
        predicts: ``[N * L]``, written at the drafts kept: the token after each.
        accept_index: ``[N, L]``, written: numbers in the batch of the known token and
            of the drafts that are kept; the rest stays as it is.
        accept_token_num: ``[N]``, written: drafts kept, the known token not counted.
        candidates: ``[N, L]``, tokens; the first of a row is the known one.
        retrive_index: ``[N, L]``, numbers of the tokens in the batch.
        retrive_next_token: not used; chains have no other order.
        retrive_next_sibling: likewise.
        uniform_samples: ``[N, L - 1]`` in [0, 1), one for each draft.
        uniform_samples_for_final_sampling: ``[N]``, for the token behind the last one.
        target_probs: ``[N, L, vocabulary]``, `p` behind each token.
        draft_probs: ``[N, L - 1, vocabulary]``, `q` of each draft.
        threshold_single: not used; SGLang gives 1.
        threshold_acc: likewise.
        deterministic: not used.
        block_verification: refused, as SGLang does off CUDA.

    Raises:
        NotImplementedError: for `block_verification`.
    """
    if block_verification:
        raise NotImplementedError("drafts are verified one by one on this platform")
    for row, tokens in enumerate(candidates.tolist()):
        count = 0
        while count < len(tokens) - 1:
            likely = target_probs[row, count, tokens[count + 1]]
            drawn = draft_probs[row, count, tokens[count + 1]]
            if not 0 < drawn <= 1 or uniform_samples[row, count] * drawn >= likely:
                break
            count += 1
        left = target_probs[row, count].clone()
        if count < len(tokens) - 1:
            left = (left - draft_probs[row, count]).clamp(min=0)
        sums = left.cumsum(0)
        coin = uniform_samples_for_final_sampling[row] * sums[-1]
        last = int(torch.searchsorted(sums, coin, right=True).clamp(max=len(left) - 1))
        places = retrive_index[row, : count + 1]
        accept_index[row, : count + 1] = places.to(accept_index.dtype)
        chosen = [*tokens[1 : count + 1], last]
        predicts[places] = torch.tensor(chosen, dtype=predicts.dtype)
        accept_token_num[row] = count
