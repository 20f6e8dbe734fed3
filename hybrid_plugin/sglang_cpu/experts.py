# SPDX-License-Identifier: Apache-2.0
"""Experts that are divided among ranks, on a CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from hybrid_plugin.upstream.hookpoints import HookPoint, resolve

COMPUTES_EXPERTS = "sglang.srt.layers.moe.fused_moe_native:moe_forward_native"
_APPLIED = "_hybrid_plugin_original"

EXPERTS = HookPoint(
    COMPUTES_EXPERTS,
    ("layer", "x", "topk_output", "moe_runner_config"),
    closed=True,
    mentions=("topk_weights", "topk_ids", "scatter_"),
)
"""What `leave_experts_to_their_rank` wraps."""


def leave_experts_to_their_rank(
    replace: Callable[[str, Callable[..., Any]], None],
) -> None:
    """Symptom: with `--ep-size 2` the first prefill on a CPU fails, "index -1 is out of
    bounds".

    Cause: SGLang gives a token's experts on other ranks the number -1, which its
    experts in PyTorch count with the others.
    Fix: it is given those of this rank alone.
    Delete when: `moe_forward_native` leaves such experts out.

    Args:
        replace: binds a target, wherever it was imported, to a function.
    """
    owner, name = resolve(COMPUTES_EXPERTS)
    original = getattr(owner, name)
    if not hasattr(original, _APPLIED):
        replace(COMPUTES_EXPERTS, _with_those_of_this_rank(original))


def _with_those_of_this_rank(original: Callable[..., Any]) -> Callable[..., Any]:
    """Each pair of a token and an expert of this rank as a token with one expert.

    SGLang's function counts the tokens of an expert by marks, so that an expert cannot
    stand for others as well.
    """

    @functools.wraps(original)
    def forward(layer: Any, x: Any, topk_output: Any, moe_runner_config: Any) -> Any:
        own = topk_output.topk_ids >= 0
        if bool(own.all()):
            return original(layer, x, topk_output, moe_runner_config)
        added = torch.zeros_like(x)
        tokens = own.nonzero()[:, 0]
        if len(tokens):
            pairs = topk_output._replace(
                topk_ids=topk_output.topk_ids[own][:, None],
                topk_weights=topk_output.topk_weights[own][:, None],
            )
            found = original(layer, x[tokens], pairs, moe_runner_config)
            added.index_add_(0, tokens, found)
        return added

    setattr(forward, _APPLIED, original)
    return forward
