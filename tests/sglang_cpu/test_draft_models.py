# SPDX-License-Identifier: Apache-2.0
"""Draft models on the CPU platform: branches see their sequence and themselves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

pytest.importorskip("sglang")

from hybrid_plugin.sglang_cpu import (
    draft_attention,
    draft_models,
    draft_tokens,
    sparse_latents,
)

BRANCHES, STEPS, HEADS, KV_HEADS, WIDTH = 3, 4, 4, 2, 8
LENGTHS = [5, 0]


@pytest.mark.parametrize("seen", [1, 2, 3])
def test_a_branch_sees_its_sequence_and_itself(seen: int) -> None:
    torch.manual_seed(0)
    keys, values = torch.randn(2, 60, KV_HEADS, WIDTH)
    table = torch.randperm(60)[: 2 * 20].view(2, 20)
    q = torch.randn(2, BRANCHES, HEADS, WIDTH)
    mask = draft_models.mask_of_branches(BRANCHES, STEPS, seen).expand(2, -1, -1)
    out = draft_attention.attend(
        q.flatten(0, 1), keys, values, table, torch.tensor(LENGTHS), mask, 0.3
    ).view_as(q)
    for row, length in enumerate(LENGTHS):
        for branch in range(BRANCHES):
            first = length + branch * STEPS
            places = table[row, [*range(length), *range(first, first + seen)]]
            expected = scaled_dot_product_attention(
                q[row, branch][None, :, None],
                keys[places].transpose(0, 1)[None],
                values[places].transpose(0, 1)[None],
                scale=0.3,
                enable_gqa=True,
            )
            torch.testing.assert_close(out[row, branch], expected[0, :, 0])


def test_branches_lie_behind_their_sequence() -> None:
    table = torch.arange(40, dtype=torch.int32).view(2, 20)
    where = torch.empty(2 * BRANCHES * 2, dtype=torch.long)
    draft_tokens.positions_of_branches(
        torch.tensor([1, 0]), table, torch.tensor(LENGTHS), where, BRANCHES, 2
    )
    assert where.tolist() == [*range(25, 31), *range(6)]
    with pytest.raises(NotImplementedError, match="positions of branches"):
        draft_tokens.positions_of_branches(
            torch.tensor([1]),
            table,
            torch.tensor([5]),
            where,
            BRANCHES,
            2,
            positions=where,
        )


def runner_of(**config: Any) -> Any:
    """SGLang's `ModelRunner` of a draft model, as far as backends read it."""
    return SimpleNamespace(
        device="cpu",
        req_to_token_pool=None,
        token_to_kv_pool=None,
        model_config=SimpleNamespace(hf_config=SimpleNamespace(**config)),
    )


def test_the_last_step_proposes_without_attention() -> None:
    runner = runner_of(architectures=["LlamaForCausalLM"])
    factory: Any = SimpleNamespace(
        draft_model_runner=runner, topk=BRANCHES, speculative_num_steps=STEPS
    )
    steps = draft_models.decode_backend(factory)
    assert steps is not None and len(steps.attn_backends) == STEPS - 1
    seen = [one._mask.sum().item() for one in steps.attn_backends]
    assert seen == [BRANCHES, 2 * BRANCHES, 3 * BRANCHES]
    factory.speculative_num_steps = 1
    assert draft_models.decode_backend(factory) is None
    assert draft_models.extend_backend(factory).token_to_kv_pool is None


def test_models_with_index_keys_have_a_backend_of_their_own() -> None:
    runner = runner_of(
        architectures=["Glm5NextForConditionalGenerationNextN"], index_topk=64
    )
    factory: Any = SimpleNamespace(
        draft_model_runner=runner, topk=1, speculative_num_steps=STEPS
    )
    steps = draft_models.decode_backend(factory)
    assert isinstance(steps, sparse_latents.DraftSteps)
    assert len(steps.attn_backends) == STEPS - 1
    extend = draft_models.extend_backend(factory)
    assert type(extend).__name__ == type(steps.attn_backends[0]).__name__
