# SPDX-License-Identifier: Apache-2.0
"""The other tests notice an access beside a kernel's tensors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack

import pytest
import torch
from hybrid_kernels import causal_conv1d

Switch = Callable[[], AbstractContextManager[None]]

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter sees addresses, a GPU does not"
)


@pytest.mark.parametrize(
    ("tokens", "slot", "message"),
    [
        (64, 1, None),
        (65, 1, "the first 0 bytes behind the end of one"),
        (64, 2, "elements lie in no tensor"),
    ],
)
def test_an_access_beside_a_tensor_fails(
    device: str, on_triton: Switch, tokens: int, slot: int, message: str | None
) -> None:
    """Tables, which no wrapper reads, name a token or a slot more than there are.

    The slot's memory exists, behind the part of a tensor that was given.
    """
    x, weight = torch.randn(64, 8), torch.randn(8, 4)
    pool, slots = torch.randn(4, 8, 3)[:2], torch.tensor([slot])
    lengths = torch.tensor([0, tokens], dtype=torch.int32)
    with on_triton(), ExitStack() as stack:
        if message is not None:
            stack.enter_context(pytest.raises(Exception, match=message))
        causal_conv1d.prefill(x, weight, None, lengths, pool, slots)
