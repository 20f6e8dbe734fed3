# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's prefill of gated delta nets as it is documented, on our reference."""

from __future__ import annotations

from itertools import pairwise

import torch
from hybrid_kernels import gated_delta_rule


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    output_final_state: bool,
    cu_seqlens: torch.Tensor,
    output: torch.Tensor,
    output_state: torch.Tensor,
    state_checkpoints: torch.Tensor,
    checkpoint_cu_starts: torch.Tensor,
    checkpoint_every_n_tokens: int,
    backend: str,
    max_seqlen: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Check what the kernel takes for granted, then run sequence after sequence.

    Sequences are not aligned to anything; checkpoint `j` of a sequence is its state
    after ``(j + 1) * checkpoint_every_n_tokens`` tokens.
    """
    every, heads = checkpoint_every_n_tokens, v.shape[1]
    bounds, starts = cu_seqlens.tolist(), checkpoint_cu_starts.tolist()
    lengths = [end - start for start, end in pairwise(bounds)]
    assert output_final_state and backend == "flashinfer"
    assert every > 0 and every % 64 == 0
    assert bounds[0] == starts[0] == 0 and bounds[-1] == len(q) == len(v) == len(output)
    assert max_seqlen == max(lengths)
    assert [b - a for a, b in pairwise(starts)] == [n // every for n in lengths]
    assert len(state_checkpoints) == max(1, starts[-1])
    assert cu_seqlens.dtype == checkpoint_cu_starts.dtype == torch.int64
    assert g.dtype == beta.dtype == torch.float32 and g.shape == (len(v), heads)
    assert initial_state.shape == (len(lengths), heads, 128, 128)
    for tensor in (q, k, v, g, beta, initial_state, output, output_state):
        assert tensor.is_contiguous()
    for row, (start, end) in enumerate(pairwise(bounds)):
        # A program for each sequence: one of an empty sequence writes no state.
        assert end > start, "a state that nobody writes"
        pool = initial_state[row : row + 1].clone()
        for number, first in enumerate(range(start, end, every)):
            part = slice(first, min(first + every, end))
            output[part] = gated_delta_rule.prefill(
                q[part],
                k[part],
                v[part],
                g[part].log(),
                beta[part],
                torch.tensor([0, part.stop - first]),
                pool,
                torch.zeros(1, dtype=torch.int64),
            )
            if part.stop - first == every:
                state_checkpoints[starts[row] + number] = pool[0]
        output_state[row] = pool[0]
    return output, output_state
