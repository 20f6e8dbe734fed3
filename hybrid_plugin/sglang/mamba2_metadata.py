# SPDX-License-Identifier: Apache-2.0
"""What SGLang's Mamba-2 kernels read about a prefill batch, computed on the host.

SGLang finds the chunks of a batch by a Python loop over tensors on the device: two
reads, and five more for every request but the first, each of which waits for what
the device was given before.  The lengths are known on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hybrid_plugin.device.arena import to_device

Array = npt.NDArray[np.int32]

_ALIGNMENT = 4
"""Each part of the upload starts at a multiple of this many int32: 16 bytes, by which
Triton tells kernels apart."""


def chunk_starts(lengths: Sequence[int], chunk_size: int) -> npt.NDArray[np.int64]:
    """First tokens of the chunks of a packed batch.

    A chunk ends at each multiple of `chunk_size` of the batch's tokens and at the end
    of each sequence.

    Args:
        lengths: of the sequences, positive.
        chunk_size: tokens.

    Returns:
        `[chunks]`, ascending.
    """
    ends = np.cumsum(lengths)
    starts: npt.NDArray[np.int64] = np.union1d(
        np.arange(0, ends[-1], chunk_size), ends[:-1]
    )
    return starts


def prepare_mixed(
    original: Callable[..., Any],
    cls: Any,
    metadata: Any,
    chunk_size: int,
    batch: Any,
) -> Any:
    """SGLang's `Mamba2Metadata` of a batch with prefills, without a read of the device.

    Args:
        original: SGLang's method, which takes batches that are not plain prefills.
        cls: SGLang's `Mamba2Metadata`.
        metadata: of all state layers, SGLang's `ForwardMetadata`.
        chunk_size: tokens in a chunk.
        batch: SGLang's `ForwardBatch`.
    """
    if not _is_plain_prefill(metadata, batch):
        return original(cls, metadata, chunk_size, batch)
    lengths, prefixes = batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu
    has_prefix = any(prefixes)
    starts = chunk_starts(lengths, chunk_size) if has_prefix else np.arange(0)
    indices, offsets, sequences = _upload(
        [
            starts // chunk_size,
            starts % chunk_size,
            np.repeat(np.arange(len(lengths)), lengths),
        ],
        metadata.query_start_loc.device,
    )
    common = cls.prepare_decode(
        metadata, batch.seq_lens, is_target_verify=False, draft_token_num=1
    )
    return replace(
        common,
        query_start_loc=metadata.query_start_loc[: len(lengths) + 1],
        num_prefills=len(lengths),
        num_prefill_tokens=len(sequences),
        num_decodes=len(batch.seq_lens) - len(lengths),
        mixed_metadata=cls.MixedMetadata(
            has_initial_states=batch.extend_prefix_lens > 0,
            prep_initial_states=has_prefix,
            chunk_size=chunk_size,
            seq_idx=sequences[None],
            chunk_indices=indices if has_prefix else None,
            chunk_offsets=offsets if has_prefix else None,
            extend_seq_lens_cpu=lengths,
        ),
    )


def _is_plain_prefill(metadata: Any, batch: Any) -> bool:
    """Whether a batch is one whose lengths are all on the host.

    Not so are decodes, and what the plugin does not serve: speculation, states that
    SGLang tracks, and batches that are padded with empty sequences.
    """
    lengths, prefixes = batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu
    return (
        batch.extend_num_tokens is not None
        and not batch.logical_forward_mode.is_decode()
        and batch.spec_info is None
        and not metadata.has_mamba_track_mask
        and bool(lengths)
        and prefixes is not None
        and len(prefixes) == len(lengths)
        and min(lengths) > 0
    )


def _upload(
    parts: Sequence[npt.NDArray[np.int64]], device: torch.device
) -> list[torch.Tensor]:
    """Send arrays to the device in one piece, as int32."""
    begins = [0]
    for part in parts:
        begins.append(begins[-1] + -(-len(part) // _ALIGNMENT) * _ALIGNMENT)
    host: Array = np.zeros(begins[-1], dtype=np.int32)
    for begin, part in zip(begins, parts, strict=False):
        host[begin : begin + len(part)] = part
    sent = to_device(torch.from_numpy(host), device)
    return [
        sent[begin : begin + len(part)]
        for begin, part in zip(begins, parts, strict=False)
    ]
