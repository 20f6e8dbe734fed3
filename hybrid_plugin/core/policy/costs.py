# SPDX-License-Identifier: Apache-2.0
"""What work costs, in tokens of prefill: the unit in which the cache counts gains.

Seen on an H200 with models of 4 to 9 billion parameters, which prefill 10,000 to 30,000
tokens in a second: a prefill pass of few tokens takes 10 to 25 ms, which the host needs
to launch it; a decode step of any batch size 10 to 20 ms; a move of some granules 1 to
6 ms (`benchmarks/results/memory-moves-h200.md`).
"""

from __future__ import annotations

PASS_TOKENS = 1024
"""Number of tokens whose prefill takes as long as a forward pass of few tokens.  It is
shared by all sequences that run: the pass decodes for them as well."""
CPU_PASS_TOKENS = 64
"""The same on a CPU, which is busy with a few tokens as it is with many."""
STEP_TOKENS = 512
"""Number of tokens whose prefill takes as long as a decode step."""
MOVE_TOKENS = 64
"""Number of tokens whose prefill takes as long as a move of memory between pools."""
SHARED_TOKENS = 256
"""Least number of tokens for which a sequence waits for another one that is computing
them, where a pass costs as much or more.  The pass behind which it resumes is one that
others run as well."""


def pass_tokens_of(device_type: str) -> int:
    """What a forward pass of few tokens costs.

    Args:
        device_type: "cpu" or "cuda", as torch calls it.
    """
    return CPU_PASS_TOKENS if device_type == "cpu" else PASS_TOKENS
