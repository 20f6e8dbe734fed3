# SPDX-License-Identifier: Apache-2.0
"""Whose kernels run a model's state layers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from enum import StrEnum

from hybrid_plugin.config import HybridConfig


class Mixer(StrEnum):
    """A kind of state layer that `hybrid_plugin.mixers` runs."""

    GATED_DELTA_NET = "gated_delta_net"
    KDA = "kda"
    MAMBA2 = "mamba2"
    LIGHTNING = "lightning"
    SHORT_CONV = "short_conv"
    MODEL_CLASS = "model_class"
    """Of our own classes, whatever they compute.  Our kernels run it in any case; asked
    for, they keep states in the middle of its passes, too."""


class Phase(StrEnum):
    """What a forward pass does with a sequence."""

    PREFILL = "prefill"
    DECODE = "decode"
    VERIFY = "verify"


TRITON = "triton"
"""The engines' name for kernels in Triton, their own."""
FLASHINFER = "flashinfer"
"""Their name for FlashInfer's."""

EVERY = sys.maxsize
"""A reach without end."""

AS_FAST: Mapping[Mixer, Mapping[Phase, Mapping[str, int]]] = {
    Mixer.GATED_DELTA_NET: {
        Phase.PREFILL: {TRITON: EVERY, FLASHINFER: 128},
        Phase.DECODE: {TRITON: EVERY},
    },
    Mixer.MAMBA2: {
        Phase.PREFILL: {TRITON: 1024},
        Phase.DECODE: {TRITON: EVERY},
    },
}
"""Libraries beside which ours had at least 0.95 of the speed at any size that was
measured on a GPU, and up to which number of a pass's tokens: of the layers that ran
there in both engines, with the same answers.  `benchmarks/kernel_table.py` prints it.
What ours lose there is less than the pass that a pause for a snapshot costs."""
MODEL_CLASSES_TRIED = False
"""Whether a GPU ran our own model classes with states that passes keep in the middle of
prompts, and in vLLM with graphs of short ones, with the same answers and in no more
time (`tests/engines/test_model_graphs_vllm.py`, `benchmarks/model_classes.py`).  Then
`auto` takes both for them."""
GRAPHED: Mapping[str, frozenset[Mixer]] = {
    "sglang": frozenset({Mixer.GATED_DELTA_NET}),
    "vllm": frozenset({Mixer.GATED_DELTA_NET, Mixer.MAMBA2}),
}
"""By engine, layers whose short prefills were replayed in CUDA graphs on a GPU, with
answers that were compared there, and in less time (`benchmarks/low_concurrency.py`)."""
GRAPHED_WITH_DRAFTS: Mapping[str, frozenset[Mixer]] = {
    "vllm": frozenset({Mixer.GATED_DELTA_NET})
}
"""The same where passes verify drafts (`benchmarks/speculation.py`); in SGLang an
option has to ask for that."""
RECORDS_AS_FAST: Mapping[str, frozenset[Mixer]] = {
    "sglang": frozenset({Mixer.GATED_DELTA_NET, Mixer.MAMBA2}),
    "vllm": frozenset({Mixer.GATED_DELTA_NET, Mixer.MAMBA2}),
}
"""By engine, layers whose drafts gave no fewer tokens a second with a record of each
draft than with a state after each, at any number of sequences that was measured on a
GPU with states in bfloat16 (`benchmarks/speculation.py`), with answers that were
compared there.  With states in float32 one sequence has 0.93 times the tokens, 32 have
1.09 times, and 128 have 1.17 times; records take less memory in any case.  One sequence
of Mamba-2 in vLLM had 0.97 times, 0.87 and 1.07 in the two rounds."""
MEASURED_ON = (9, 0)
"""Compute capability of that GPU.  On others tiles may not even fit."""


def measured_here() -> bool:
    """Whether this process's GPU is of the kind that was measured."""
    import torch  # the table itself is read without it

    is_nvidia = torch.version.cuda is not None and torch.cuda.is_available()
    return is_nvidia and torch.cuda.get_device_capability() == MEASURED_ON


def reach(
    option: str,
    mixer: Mixer,
    phase: Phase,
    device_type: str,
    theirs: Callable[[], str],
) -> int:
    """Tokens of a pass up to which our kernels run a kind of layer; 0 for never.

    Longer passes are the engine's.  Passes that keep states in the middle of a prompt
    are ours however long they are: the engines ask their kernels for none, and to pause
    a prompt costs a pass more.  See `is_divided` for what of them is ours.

    Args:
        option: `wanted_kernels` of `HybridConfig`.
        mixer: the kind of layer.
        phase: what the pass does.
        device_type: "cpu" or "cuda", as torch calls it.  On a CPU ours are a plain
            reference, which only `ours` asks for.
        theirs: finds the library that the engine takes otherwise, as engines call it:
            "triton", "flashinfer", "cutedsl" ...; asked where that decides.
    """
    if option != "auto":
        return EVERY if option == "ours" else 0
    beaten = _as_fast(mixer, phase)
    if device_type == "cpu" or not beaten or not measured_here():
        return 0
    return beaten.get(theirs(), 0)


def _as_fast(mixer: Mixer, phase: Phase) -> Mapping[str, int] | None:
    """`AS_FAST`; a model class of ours runs on our kernels in any case."""
    if mixer is Mixer.MODEL_CLASS:
        return {TRITON: EVERY} if MODEL_CLASSES_TRIED else None
    return AS_FAST.get(mixer, {}).get(phase)


def is_divided(mixer: Mixer, longest: int, library: str) -> bool:
    """Whether passes beyond our reach that keep states are mostly the library's.

    Args:
        mixer: the kind of layer.
        longest: the reach of our prefill.
        library: that the engine takes for prefills otherwise.
    """
    beaten = 0 < longest < EVERY and library == FLASHINFER
    return beaten and mixer is Mixer.GATED_DELTA_NET


def are_graphed(engine: str, mixers: frozenset[Mixer], *, drafts: bool = False) -> bool:
    """Whether short prefills replay graphs where no option says.

    Args:
        engine: "vllm" or "sglang".
        mixers: of the model's state layers, all on our kernels.
        drafts: whether passes verify drafts.
    """
    measured = (GRAPHED_WITH_DRAFTS if drafts else GRAPHED)[engine]
    if MODEL_CLASSES_TRIED and engine == "vllm" and not drafts:
        measured |= {Mixer.MODEL_CLASS}
    return bool(mixers) and mixers <= measured and measured_here()


def are_recorded(
    options: HybridConfig, find_mixer: Callable[[], Mixer | None], engine: str
) -> bool:
    """Whether drafts leave a record of what they do to a state, and no states.

    Args:
        options: of the plugin.
        find_mixer: finds the kind of the model's state layers, None where there are no
            kernels of ours for it; asked where that decides.
        engine: "vllm" or "sglang".
    """
    if options.draft_states != "auto":
        return options.draft_states == "replay"
    fast = RECORDS_AS_FAST[engine]
    if not fast or options.kernels == "engine" or not measured_here():
        return False
    return find_mixer() in fast
