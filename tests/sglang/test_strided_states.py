# SPDX-License-Identifier: Apache-2.0
"""Prefills of gated delta nets work on the elastic pool itself, not on copies."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang.kernels.ops.attention.fla import l2norm
from sglang.srt.layers.attention.linear.kernels.gdn_flashinfer import (
    FlashInferGDNKernel,
)
from sglang.srt.layers.attention.linear.kernels.gdn_triton import TritonGDNKernel

from hybrid_plugin.sglang import patches, strided_states
from hybrid_plugin.sglang.pool_memory import PoolMemory

HEADS, WIDTH = 2, 4


def run_script(*flags: str) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ)
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
        environment.pop("SGLANG_PLATFORM", None)
    return subprocess.run(
        [sys.executable, "-m", "tests.sglang.interpreted", *flags],
        env=environment,
        capture_output=True,
        text=True,
    )


def test_sglang_s_kernels_treat_slot_major_states_as_contiguous_ones() -> None:
    done = run_script()
    assert done.returncode == 0, done.stderr


def test_without_the_hooks_what_they_write_is_lost() -> None:
    done = run_script("--without-hooks")
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("AssertionError: the pools differ")


class AnotherKernel:
    """Is not known to take strides."""


def built(
    kernel: type, monkeypatch: pytest.MonkeyPatch, *, shared: Any = None
) -> SimpleNamespace:
    """A backend that chose this kernel, after our hook saw it."""
    hooks: dict[str, Any] = {}
    monkeypatch.setattr(
        patches, "_hook", lambda target, _, hook: hooks.update({target: hook})
    )
    memory = PoolMemory()
    memory.shared = shared
    patches._leave_states_in_place(memory)
    backend = SimpleNamespace(
        kernel_dispatcher=SimpleNamespace(extend_kernel=kernel.__new__(kernel)),
        requires_contiguous_prefill_state=True,
    )
    (hook,) = (hook for target, hook in hooks.items() if target.endswith("__init__"))
    assert hook(None, backend, "model runner") is None
    return backend


@pytest.mark.parametrize(
    ("kernel", "gathers"),
    [(TritonGDNKernel, False), (FlashInferGDNKernel, False), (AnotherKernel, True)],
)
def test_states_are_gathered_for_kernels_that_need_it(
    kernel: type, gathers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = built(kernel, monkeypatch, shared=object())
    assert backend.requires_contiguous_prefill_state is gathers


def test_fixed_pools_are_left_to_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    assert built(TritonGDNKernel, monkeypatch).requires_contiguous_prefill_state


def guard(function: Any) -> Any:
    """As SGLang's: makes every tensor contiguous."""

    def guarded(*args: Any) -> Any:
        return function(
            *(a.contiguous() if isinstance(a, torch.Tensor) else a for a in args)
        )

    guarded.__wrapped__ = function  # type: ignore[attr-defined]
    return guarded


def test_only_the_states_pass_the_guard() -> None:
    seen: list[bool] = []

    def add(ctx: str, q: Any, scale: float, initial_state: Any, indices: Any) -> str:
        seen.append(q.is_contiguous())
        initial_state[indices] += scale
        return ctx

    original = guard(add)
    hook = strided_states.past_guard(original, guard)
    strided = torch.zeros(5, 3 * HEADS)[:, :HEADS]
    q, indices = torch.zeros(4, 6).t(), torch.tensor([3, 1])
    assert hook(original, "ctx", q, 2.0, strided, indices) == "ctx"
    assert strided[:, 0].tolist() == [0, 2, 0, 2, 0]
    contiguous = torch.zeros(5, HEADS)
    assert hook(original, "ctx", q, 2.0, contiguous, indices) == "ctx"
    assert torch.equal(contiguous, strided)
    assert hook(guard(lambda *args: args[3]), "ctx", q, 2.0, None, indices) is None
    assert seen == [True, True]


def test_a_function_without_states_is_no_place_for_the_hook() -> None:
    with pytest.raises(ValueError, match="initial_state"):
        strided_states.past_guard(guard(lambda ctx, q: None), guard)


def test_flashinfer_s_kernel_gathers_and_scatters_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def prefill(*, initial_state: torch.Tensor, output_state: torch.Tensor, **kw: Any):  # type: ignore[no-untyped-def]
        assert initial_state.is_contiguous()
        return kw["v"], output_state.copy_(initial_state + 1)

    monkeypatch.setattr(l2norm, "gdn_prefill_qkv_prepare_fwd", lambda *qkv: qkv)
    kernel: Any = FlashInferGDNKernel.__new__(FlashInferGDNKernel)
    kernel.use_state_pool, kernel._prefill_fn = False, prefill
    rows = torch.full((6, 3 * HEADS * WIDTH * WIDTH), torch.nan)
    size = HEADS * WIDTH * WIDTH
    states = rows[:, size : 2 * size].view(6, HEADS, WIDTH, WIDTH)
    states[4], states[1] = 4.0, 0.0
    x = torch.zeros(1, 7, HEADS, WIDTH)
    gates = torch.zeros(1, 7, HEADS)
    kernel.extend(
        x,
        x,
        x,
        gates,
        gates,
        ssm_states=states,
        cache_indices=torch.tensor([4, 1], dtype=torch.int32),
        query_start_loc=torch.tensor([0, 5, 7], dtype=torch.int32),
    )
    assert bool((states[4] == 5).all()) and bool((states[1] == 1).all())
    assert int(rows.isfinite().sum()) == 2 * size
