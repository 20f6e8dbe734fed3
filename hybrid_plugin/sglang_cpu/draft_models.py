# SPDX-License-Identifier: Apache-2.0
"""Draft models on a CPU: the attention of the steps in which they propose tokens.

A sequence has `topk` branches.  Their KV lies behind the sequence's own tokens, `steps`
positions for each branch, in that order.  Models with index keys have a backend of
their own (`sparse_latents`).
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.configs.model_config import is_deepseek_dsa
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from hybrid_plugin.sglang_cpu import sparse_latents
from hybrid_plugin.sglang_cpu.draft_attention import attend


class DraftStepBackend(TorchNativeAttnBackend):
    """Attention of one step: each branch sees its sequence and itself."""

    def __init__(self, runner: Any, branches: int, steps: int, step: int) -> None:
        """Work for a draft model.

        Args:
            runner: SGLang's, of the model.
            branches: of a sequence.
            steps: in which the model proposes.
            step: of these; 0 is the first.
        """
        super().__init__(runner)
        self._mask = mask_of_branches(branches, steps, step + 1)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: Any,
        v: Any,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        """Run one token of each branch."""
        if save_kv_cache and k is not None:
            where = KVWriteLoc(forward_batch.out_cache_loc, None)
            self.token_to_kv_pool.set_kv_buffer(layer, where, k, v)
        return attend(
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            self.token_to_kv_pool.get_key_buffer(layer.layer_id),
            self.token_to_kv_pool.get_value_buffer(layer.layer_id),
            self.req_to_token_pool.req_to_token[forward_batch.req_pool_indices],
            forward_batch.seq_lens,
            self._mask.expand(forward_batch.seq_lens.numel(), -1, -1),
            layer.scaling,
        ).flatten(1)


class DraftSteps:
    """What SGLang takes for the backend of all steps."""

    def __init__(self, runner: Any, branches: int, steps: int) -> None:
        """As for `DraftStepBackend`; the last step proposes without attention."""
        self.attn_backends = [
            DraftStepBackend(runner, branches, steps, step) for step in range(steps - 1)
        ]

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """There is nothing to prepare."""


def decode_backend(self: Any) -> DraftSteps | sparse_latents.DraftSteps | None:
    """For SGLang's `DraftBackendFactory`, which knows no backend of ours.

    Returns:
        None where no step needs attention.
    """
    if self.speculative_num_steps <= 1:
        return None
    runner = self.draft_model_runner
    kind = sparse_latents.DraftSteps if _has_index_keys(runner) else DraftSteps
    return kind(runner, self.topk, self.speculative_num_steps)


def extend_backend(self: Any) -> Any:
    """The same, for the accepted tokens behind each verification."""
    runner = self.draft_model_runner
    if _has_index_keys(runner):
        return sparse_latents.make_backend(runner)
    return TorchNativeAttnBackend(runner)


def _has_index_keys(runner: Any) -> bool:
    """Whether a draft model chooses by index keys what it reads."""
    return bool(is_deepseek_dsa(runner.model_config.hf_config))


def mask_of_branches(branches: int, steps: int, seen: int) -> torch.Tensor:
    """``[branches, branches * steps]``: which positions a branch sees, its own.

    Args:
        branches: of a sequence.
        steps: positions of a branch.
        seen: of these, the first that have KV.
    """
    own = torch.eye(branches, dtype=torch.bool)[:, :, None].repeat(1, 1, steps)
    own[:, :, seen:] = False
    return own.flatten(1)
