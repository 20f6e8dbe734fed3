# SPDX-License-Identifier: Apache-2.0
"""Whether answers are the greedy ones of a model, by `transformers` in float32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.engines.messages import Answer, Ask


def gaps(
    model: Path, asks: Sequence[Ask], answers: Sequence[Answer]
) -> Iterator[float]:
    """For each answer, how much likelier another token was at most, in nats.

    An answer all of whose tokens are the likeliest after those before them is the
    one that greedy generation gives, so one forward pass is enough to tell.
    """
    from transformers import AutoModelForCausalLM

    network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    network.eval()
    for ask, answer in zip(asks, answers, strict=True):
        tokens = torch.tensor([[*ask.prompt, *answer.tokens]])
        with torch.no_grad():
            logits = network(tokens).logits[0, len(ask.prompt) - 1 : -1]
        chosen = logits.gather(1, tokens[0, len(ask.prompt) :, None])[:, 0]
        yield float((logits.max(1).values - chosen).max())
