# SPDX-License-Identifier: Apache-2.0
"""Gated residual streams and n-gram embeddings on a CPU, in the model's own type."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import msgspec
import torch

_APPLIED = "_hybrid_plugin_original"
_COMPILED = ("_mix_compute", "_combine_compute")


def mix_in_the_models_type() -> None:
    """Symptom: in float32 a Qwen4-Exp fails, "expected m1 and m2 to have the same
    dtype"; in any type the first passes take minutes.

    Cause: the weights that mix its residual streams are in bfloat16 whatever the
    model's type, and mixing is compiled, for each shape anew.
    Fix: build them in the model's type, and mix as it is written.
    Delete when: SGLang takes the model's type, and compiles on GPUs alone.
    """
    from sglang.srt.layers.hyperconnection import GatedResidual

    original = GatedResidual.__init__
    if hasattr(original, _APPLIED):
        return

    @functools.wraps(original)
    def build(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        kind = torch.get_default_dtype()
        config = msgspec.structs.replace(config, params_dtype=kind)
        original(self, config, *args, **kwargs)
        for name in _COMPILED:
            setattr(self, name, _as_written(getattr(self, name)))

    setattr(build, _APPLIED, original)
    GatedResidual.__init__ = build


def embed_in_the_models_type() -> None:
    """Symptom: in float32 a Qwen4-Exp fails, "expected m1 and m2 to have the same
    dtype", where it embeds n-grams.

    Cause: that table is in bfloat16 whatever the model's type, and so is what it gives.
    Fix: a table that gives another type than the model's is built in the model's.
    Delete when: SGLang converts.
    """
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

    original = VocabParallelEmbedding.__init__
    if hasattr(original, _APPLIED):
        return

    @functools.wraps(original)
    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("output_dtype") is not None:
            kind = torch.get_default_dtype()
            kwargs |= {"params_dtype": kind, "output_dtype": kind}
        original(self, *args, **kwargs)

    setattr(build, _APPLIED, original)
    VocabParallelEmbedding.__init__ = build


def _as_written(function: Callable[..., Any]) -> Callable[..., Any]:
    """What `torch.compile` was given."""
    written: Callable[..., Any] = getattr(
        function, "_torchdynamo_orig_callable", function
    )
    return written
