# SPDX-License-Identifier: Apache-2.0
"""Sparse attention over latents on a CPU, by pooled index keys.

A query reads the tokens whose index keys suit it best, and those that no index key
stands for yet.  Drafts are verified in chains, each of which sees the drafts before it:
their tokens go one by one into the ring, as those of decode steps do, and those that
are not accepted are overwritten by what comes in their place.  `T` tokens of a pass,
`H` heads, `L` numbers of a latent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from hybrid_plugin.sglang_cpu import index_keys
from hybrid_plugin.sglang_cpu.draft_attention import mask_among_drafts
from hybrid_plugin.sglang_cpu.plain_memory import WithoutPinning

BACKEND = "dsa"
"""SGLang's name for backends of such attention."""
_UNSUPPORTED = (
    "SGLang on the platform hybrid_cpu runs sparse attention with pooled index keys "
    "only; run this model on a GPU."
)
_TREE = (
    "SGLang on the platform hybrid_cpu verifies chains of drafts for models with index "
    "keys, and no trees; set --speculative-eagle-topk to 1."
)


@dataclass(frozen=True)
class Pass:
    """What the layers of a forward pass read alike."""

    pieces: torch.Tensor
    """``[sequences, pieces]``: pages in pieces as large as one of index keys."""
    kpool_extend_plan: Any = None
    """SGLang's plan of the index keys that a prefill completes."""


def read_chosen_latents() -> None:
    """Symptom: on a CPU, GLM-5.3-Flash does not start, "Found no NVIDIA driver".

    Cause: SGLang's backend for sparse attention over latents, and what chooses the
    tokens, are made of kernels for GPUs.
    Fix: give both a form in PyTorch.
    Delete when: SGLang has one.
    """
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.layers.attention.dsa.dsa_indexer_kpool import IndexerKPool

    ATTENTION_BACKENDS[BACKEND] = make_backend
    IndexerKPool.register_oot_forward(IndexerKPool, choose, "native")


def plan_in_plain_memory() -> None:
    """Symptom: a prefill with pooled index keys fails, "Cannot access accelerator
    device when none is available".

    Cause: its plan is made in pinned memory whatever the platform says.
    Fix: the module that plans sees a PyTorch that pins no tensor.
    Delete when: SGLang asks `is_pin_memory_available` there as elsewhere.
    """
    from sglang.srt.layers.attention.dsa import kpool_plan

    kpool_plan.torch = WithoutPinning()


def make_backend(runner: Any) -> Any:
    """What SGLang calls for `--attention-backend dsa`.

    Args:
        runner: SGLang's `ModelRunner`.
    """
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    class SparseLatents(TorchNativeAttnBackend):
        """Attention to the tokens that an indexer chose."""

        use_mha = False

        def init_forward_metadata(self, forward_batch: Any) -> None:
            """Plan which index keys this pass makes."""
            super().init_forward_metadata(forward_batch)
            self.forward_metadata = _plan(self, forward_batch)

        def forward_extend(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            """A prefill."""
            return _attend(self, *args, **kwargs)

        def forward_decode(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            """One token of each sequence."""
            return _attend(self, *args, **kwargs)

        def get_indexer_metadata(self, layer_id: int, forward_batch: Any) -> Any:
            """What the layers of this pass read alike."""
            return self.forward_metadata

    return SparseLatents(runner)


class DraftSteps:
    """What SGLang takes for the backend of all steps in which a draft model proposes.

    A step is a decode of one token, behind those of the steps before it; all of them
    read the same plan.
    """

    def __init__(self, runner: Any, branches: int, steps: int) -> None:
        """Work for a draft model.

        Args:
            runner: SGLang's, of the model.
            branches: of a sequence.
            steps: in which the model proposes; the last one needs no attention.

        Raises:
            NotImplementedError: for several branches.
        """
        if branches > 1:
            raise NotImplementedError(_TREE)
        backend = make_backend(runner)
        self.attn_backends = [backend] * (steps - 1)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan where the index keys of the steps' tokens go."""
        self.attn_backends[0].init_forward_metadata(forward_batch)


def choose(
    self: Any,
    x: torch.Tensor,
    q_lora: torch.Tensor,
    positions: torch.Tensor,
    forward_batch: Any,
    layer_id: int,
    return_indices: bool = True,
    use_cuda_graph: bool = True,
) -> torch.Tensor | None:
    """Keep the index keys of a pass, and choose which tokens each query reads.

    Args:
        self: SGLang's `IndexerKPool`.
        x: ``[T, hidden]``.
        q_lora: ``[T, rank]``.
        positions: ``[T]``.
        forward_batch: SGLang's.
        layer_id: of the attention layer.
        return_indices: whether anybody reads them.
        use_cuda_graph: not used.

    Returns:
        ``[T, width]``: positions in the query's own sequence, -1 behind them.

    Raises:
        NotImplementedError: for index keys with positions.
    """
    from sglang.srt.model_executor.forward_context import (
        get_attn_backend,
        get_token_to_kv_pool,
    )

    if not self.skip_rope:
        raise NotImplementedError(_UNSUPPORTED)
    pool = get_token_to_kv_pool()
    plan: Pass = get_attn_backend().get_indexer_metadata(layer_id, forward_batch)
    keys = self.k_norm(self.wk(x)[0].float()).to(torch.bfloat16)
    scores = functional.linear(x.float(), self.index_kpool_compress_gate.float())
    _keep(self, pool, plan, keys, scores.bfloat16(), positions, forward_batch, layer_id)
    if not return_indices:
        return None
    queries = self.wq_b(q_lora)[0].view(len(x), self.n_heads, self.head_dim).float()
    weights = self.weights_proj(x.float())[0] * self.n_heads**-0.5
    chosen = []
    buf = pool.get_index_k_with_scale_buffer(layer_id)
    for row, mine, length in _rows(forward_batch):
        count = torch.arange(length // self.index_kpool)[None]
        places = index_keys.places_of(pool, plan.pieces[row : row + 1], count)[0]
        known = index_keys.read(pool, buf, places)
        alike = torch.einsum("thd,kd->thk", queries[mine], known) * self.softmax_scale
        total = torch.einsum("th,thk->tk", weights[mine].float(), alike.relu())
        chosen.append(_best(total, positions[mine], self.index_kpool, self.index_topk))
    return torch.cat(chosen)


def _keep(
    indexer: Any,
    pool: Any,
    plan: Pass,
    keys: torch.Tensor,
    scores: torch.Tensor,
    positions: torch.Tensor,
    batch: Any,
    layer: int,
) -> None:
    """Write index keys, and the ring, by SGLang's own functions for it."""
    ape, is_rounded = indexer.index_kpool_compress_ape, indexer.scale_fmt is not None
    if not batch.forward_mode.is_extend_without_speculative():
        width = _tokens_of_each(batch)
        for number in range(width):
            place = positions[number::width]
            pool.kpool_decode_update_index_cache(
                layer_id=layer,
                key=keys[number::width],
                slot_score=scores[number::width],
                ape=ape,
                block_tables=plan.pieces,
                req_pool_indices=batch.req_pool_indices,
                positions=place,
                seq_lens=place + 1,
                out_cache_loc=batch.out_cache_loc[number::width],
                round_scale=is_rounded,
            )
        return
    writes, tails = plan.kpool_extend_plan.writes, plan.kpool_extend_plan.tails
    tail_k, tail_score = pool.get_compress_tail_buffers(layer)
    index_keys.pool_and_write(
        pool,
        pool.get_index_k_with_scale_buffer(layer),
        keys,
        scores,
        tail_k,
        tail_score,
        writes.req,
        writes.n_from_tail,
        writes.chunk_src,
        writes.tail_logical_base,
        ape,
        writes.write_loc,
        round_scale=is_rounded,
    )
    index_keys.leave_in_ring(
        pool,
        keys,
        scores,
        tail_k,
        tail_score,
        tails.req,
        tails.dst_logical_start,
        tails.chunk_src,
        tails.n_write,
    )


def _best(
    scores: torch.Tensor, positions: torch.Tensor, size: int, most: int
) -> torch.Tensor:
    """Tokens of the index keys with the highest scores, and those without a key.

    Args:
        scores: ``[queries, keys]``, changed.
        positions: ``[queries]``.
        size: tokens of an index key.
        most: tokens to choose by index keys.
    """
    seen = (positions.long() + 1)[:, None]
    number = torch.arange(scores.shape[1])
    scores.masked_fill_((number + 1) * size > seen, -torch.inf)
    best = scores.topk(min(most // size, scores.shape[1]), -1)
    tokens = best.indices[..., None] * size + torch.arange(size)
    tokens = tokens.masked_fill((best.values == -torch.inf)[..., None], -1).flatten(1)
    tail = seen // size * size + torch.arange(size - 1)
    tail = tail.masked_fill(tail >= seen, -1)
    chosen = torch.full((len(scores), most + size - 1), -1, dtype=torch.int32)
    chosen[:, : tokens.shape[1]] = tokens
    chosen[:, most:] = tail
    return chosen


def _plan(backend: Any, batch: Any) -> Pass:
    """What the layers of a pass read alike."""
    from sglang.srt.layers.attention.dsa import kpool_plan

    pool, mode = backend.token_to_kv_pool, batch.forward_mode
    if mode.is_target_verify():
        _require_chains(batch)
    size = pool.index_page_size
    table = backend.req_to_token_pool.req_to_token[batch.req_pool_indices.long()]
    found = Pass(table[:, ::size] // size)
    if not mode.is_extend_without_speculative():
        return found
    return kpool_plan.init_kpool_extend_metadata(
        found,
        batch,
        kpool=pool.index_kpool,
        physical_page_size=size,
        index_page_size=size,
        topk_transform_method=None,
        full_real_page_table=found.pieces,
        full_seqlens_expanded=batch.positions + 1,
    )


def _rows(batch: Any) -> Iterator[tuple[int, slice, int]]:
    """Each sequence's row, tokens of the pass, and length with them."""
    positions = batch.positions.tolist()
    if batch.forward_mode.is_extend_without_speculative():
        counts = batch.extend_seq_lens.tolist()
    else:
        counts = [_tokens_of_each(batch)] * len(batch.seq_lens)
    start = 0
    for row, count in enumerate(counts):
        end = start + count
        yield row, slice(start, end), positions[end - 1] + 1
        start = end


def _tokens_of_each(batch: Any) -> int:
    """Tokens of each sequence in a pass that gives all of them equally many."""
    return len(batch.positions) // len(batch.seq_lens)


def _require_chains(batch: Any) -> None:
    """Refuse trees, whose drafts do not stand at the positions behind each other.

    Raises:
        NotImplementedError: if a draft does not see all drafts before it.
    """
    info = batch.spec_info
    drafts = info.draft_token_num
    seen = mask_among_drafts(info.custom_mask, batch.seq_lens, drafts)
    if not torch.equal(seen, torch.ones_like(seen).tril()):
        raise NotImplementedError(_TREE)


def _attend(
    backend: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: Any,
    forward_batch: Any,
    save_kv_cache: bool = True,
    q_rope: torch.Tensor | None = None,
    k_rope: torch.Tensor | None = None,
    topk_indices: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Attention of queries to the latents of the tokens chosen for each.

    Args:
        backend: of a layer.
        q: ``[T, H, L]``.
        k: ``[T, 1, L]``, kept.
        v: not used; latents are both.
        layer: SGLang's `RadixAttention`.
        forward_batch: SGLang's.
        save_kv_cache: whether `k` is kept.
        q_rope: ``[T, H, R]``.
        k_rope: ``[T, 1, R]``.
        topk_indices: ``[T, width]``, as `choose` returns.
        kwargs: not used.

    Returns:
        ``[T, H * L]``.

    Raises:
        NotImplementedError: where no indexer chose.
    """
    if topk_indices is None:
        raise NotImplementedError(_UNSUPPORTED)
    kept = backend.token_to_kv_pool.get_key_buffer(layer.layer_id)
    width = layer.v_head_dim
    queries = q.view(-1, layer.tp_q_head_num, width)
    if save_kv_cache:
        latent = k.view(len(k), 1, width)
        if k_rope is not None:
            latent = torch.cat([latent, k_rope.view(len(k), 1, -1)], -1)
        kept[forward_batch.out_cache_loc] = latent.to(kept.dtype)
    if q_rope is not None:
        queries = torch.cat([queries, q_rope], -1)
    table = backend.req_to_token_pool.req_to_token
    out = q.new_empty((len(queries), layer.tp_q_head_num, width))
    for row, mine, _ in _rows(forward_batch):
        chosen = topk_indices[mine].long()
        places = table[forward_batch.req_pool_indices[row], chosen.clamp(min=0)]
        latents = kept[places.long(), 0].to(q.dtype)
        scores = torch.einsum("thd,tkd->thk", queries[mine], latents) * layer.scaling
        scores = scores.masked_fill((chosen < 0)[:, None], -torch.inf)
        shares = scores.softmax(-1)
        out[mine] = torch.einsum("thk,tkd->thd", shares, latents[..., :width])
    return out.flatten(1)
