# SPDX-License-Identifier: Apache-2.0
"""What the option `deterministic` needs of SGLang."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from hybrid_plugin.core.commands import CHUNK


def obstacles(view: Any, page_size: int) -> Iterator[str]:
    """Sentences about what of these arguments makes answers depend on the batch.

    Args:
        view: SGLang's arguments, resolved.
        page_size: tokens in a page.
    """
    if not str(view.device).startswith("cuda"):
        yield "deterministic is promised on a GPU only; leave it out."
    if not view.enable_deterministic_inference:
        yield (
            "deterministic needs SGLang's own deterministic mode for everything beside "
            "the state layers; give --enable-deterministic-inference."
        )
    if view.enable_priority_scheduling and not view.disable_priority_preemption:
        yield (
            "deterministic admits nobody who might be preempted, and priorities do "
            "preempt; give --disable-priority-preemption."
        )
    if view.enable_mixed_chunk:
        yield (
            "deterministic decodes with other kernels than it prefills; drop "
            "--enable-mixed-chunk."
        )
    if view.speculative_algorithm is not None:
        yield (
            "deterministic is not served with drafts, which are verified by other "
            "kernels than decode; drop --speculative-algorithm."
        )
    if view.enable_lora:
        yield "deterministic is not served with LoRA adapters; drop --enable-lora."
    # A prompt's last pass has more than one token, so a chunk may have to wait for it.
    least = 2 * math.lcm(CHUNK, page_size)
    if view.chunked_prefill_size is not None and view.chunked_prefill_size < least:
        yield (
            f"deterministic computes prompts in whole chunks; set "
            f"--chunked-prefill-size to {least} at least."
        )
