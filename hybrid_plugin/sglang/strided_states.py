# SPDX-License-Identifier: Apache-2.0
"""Prefills of SGLang's gated delta nets on slot-major states, without copies of them.

SGLang gathers the states of a batch where a slot's are not side by side, runs its
kernels on the copies and scatters these back, in every layer.  Its kernels take the
states' strides, and multiply by them in 64 bits; only a guard in front of one of them
copies what is not contiguous.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

_UPDATES_IN_PLACE = frozenset({"TritonGDNKernel", "FlashInferGDNKernel"})
"""SGLang's prefill kernels that need no gathered states: the first one takes strides,
past its guard; the second one gathers and scatters for itself, by indexing."""


def leave_in_place(backend: Any) -> None:
    """Have SGLang's `GDNAttnBackend` give prefill kernels the pool itself.

    A kernel that is not known goes on with gathered states.
    """
    kernel = type(backend.kernel_dispatcher.extend_kernel).__name__
    if kernel in _UPDATES_IN_PLACE:
        backend.requires_contiguous_prefill_state = False


def past_guard(
    forward: Callable[..., Any],
    guard: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> Callable[..., Any]:
    """A hook around SGLang's chunked delta rule: strided states are updated in place.

    All other tensors pass the guard, which makes them contiguous.

    Args:
        forward: SGLang's function, with its guard; takes `initial_state`, `[slots,
            heads, values, keys]`, by position.
        guard: the decorator.

    Returns:
        A function of the guarded one and its arguments.

    Raises:
        ValueError: if it takes no `initial_state`.
    """
    bare = inspect.unwrap(forward)
    place = list(inspect.signature(bare).parameters).index("initial_state")

    def run(original: Callable[..., Any], *args: Any) -> Any:
        states = args[place]
        if states is None or states.is_contiguous():
            return original(*args)
        _check_slots(states)

        def with_states(*others: Any) -> Any:
            return bare(*others[:place], states, *others[place:])

        return guard(with_states)(*args[:place], *args[place + 1 :])

    return run


def _check_slots(states: torch.Tensor) -> None:
    """The kernel takes the step from slot to slot, and no other.

    Raises:
        RuntimeError: if a slot's state is not contiguous.
    """
    if not states[0].is_contiguous():
        raise RuntimeError(
            f"hybrid-plugin: states of strides {states.stride()} are not served by "
            "SGLang's kernel; set elastic to false."
        )
