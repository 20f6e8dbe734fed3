# SPDX-License-Identifier: Apache-2.0
"""Trees of drafts: their links, and which drafts are what the model would have said.

`N` sequences have `L` drafts each; the first of a row is the root, the last token that
is known.  Links are numbers of drafts within a row, -1 for none.
"""

from __future__ import annotations

import torch
from hybrid_kernels import speculative


def links_of_mask(
    tree_mask: torch.Tensor,
    verified_seq_len: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """Write the links of trees that are given as masks.

    Args:
        tree_mask: ``[N * L * L]`` bool; of a row, whether a draft sees another one.
        verified_seq_len: ``[N]``, tokens before the roots.
        positions: ``[N * L]``, written: tokens before each draft.
        retrieve_index: ``[N, L]``, written: numbers of drafts in the batch.
        retrieve_next_token: ``[N, L]``, written: first children.
        retrieve_next_sibling: ``[N, L]``, written.
        batch_size: `N`.
        draft_token_num: `L`.
    """
    shape = (batch_size, draft_token_num)
    mask = tree_mask[: batch_size * draft_token_num**2].view(*shape, -1).bool()
    depths = mask.tril(-1).sum(2)
    positions.view(shape).copy_(depths + verified_seq_len[:, None])
    retrieve_index.copy_(torch.arange(batch_size * draft_token_num).view(shape))
    _link(speculative.parents_of_mask(mask), retrieve_next_token, retrieve_next_sibling)


def build(
    parent_list: torch.Tensor,
    top_scores_index: torch.Tensor,
    seq_lens: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    topk: int,
    spec_steps: int,
    num_verify_tokens: int,
    tree_mask_mode: int,
) -> None:
    """Write mask, positions and links of the drafts that EAGLE chose to verify.

    EAGLE proposes `topk` tokens after the root and `topk` after each of `topk` of
    these, and so on, and numbers them; ``parent_list[n, i // topk]`` is the number of
    the one that proposal `i` follows, of the root's own it does not count.

    Args:
        parent_list: ``[N, ...]``.
        top_scores_index: ``[N, L - 1]``, numbers of the chosen proposals, ascending.
        seq_lens: ``[N]``, tokens before the roots.
        tree_mask: flat, written.  Mode 0: of each row ``[L, seq_len + L]``; mode 1:
            ``[L, L]``.
        positions: ``[N * L]``, written: tokens before each draft.
        retrieve_index: ``[N, L]``, written: numbers of drafts in the batch.
        retrieve_next_token: ``[N, L]``, written: first children.
        retrieve_next_sibling: ``[N, L]``, written.
        topk: proposals after a draft.
        spec_steps: depth of a tree at most; not used.
        num_verify_tokens: `L`.
        tree_mask_mode: 0 or 1.

    Raises:
        NotImplementedError: for a mask in bits.
    """
    if tree_mask_mode not in (0, 1):
        raise NotImplementedError("masks of trees in bits are not supported")
    rows, drafts = seq_lens.shape[0], num_verify_tokens
    parents = _parents(parent_list, top_scores_index, topk)
    mask = _mask(parents)
    positions.view(rows, drafts).copy_(mask.sum(2) - 1 + seq_lens[:, None])
    retrieve_index.copy_(torch.arange(rows * drafts).view(rows, drafts))
    _link(parents, retrieve_next_token, retrieve_next_sibling)
    if tree_mask_mode == 1:
        tree_mask[: mask.numel()].copy_(mask.reshape(-1))
        return
    start = 0
    for row, length in enumerate(seq_lens.tolist()):
        part = tree_mask[start : start + drafts * (length + drafts)]
        part.view(drafts, -1)[:, :length] = True
        part.view(drafts, -1)[:, length:] = mask[row]
        start += part.numel()


def accept(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
    topk: int = -1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Follow each tree from its root as long as a child is what the model predicts.

    Args:
        predicts: ``[N * L]``, written at the accepted drafts: the token after each.
        accept_index: ``[N, M]``, written: numbers in the batch of the root and of the
            accepted drafts, in their order; the rest stays as it is.
        accept_token_num: ``[N]``, written: accepted drafts, the root not counted.
        candidates: ``[N, L]``, tokens of the drafts.
        retrieve_index: ``[N, L]``, numbers of drafts in the batch.
        retrieve_next_token: ``[N, L]``, first children.
        retrieve_next_sibling: ``[N, L]``.
        target_predict: ``[N, L]``, the token that the model puts after each draft.
        topk: not used.

    Returns:
        `predicts`, `accept_index` and `accept_token_num`.
    """
    tokens, predicted = candidates.tolist(), target_predict.tolist()
    children, siblings = retrieve_next_token.tolist(), retrieve_next_sibling.tolist()
    for row in range(len(tokens)):
        path = [0]
        while len(path) < accept_index.shape[1]:
            child = children[row][path[-1]]
            while child >= 0 and tokens[row][child] != predicted[row][path[-1]]:
                child = siblings[row][child]
            if child < 0:
                break
            path.append(child)
        places = retrieve_index[row, path]
        accept_index[row, : len(path)] = places.to(accept_index.dtype)
        predicts[places] = target_predict[row, path].to(predicts.dtype)
        accept_token_num[row] = len(path) - 1
    return predicts, accept_index, accept_token_num


def sample(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    threshold_single: float,
    threshold_acc: float,
    deterministic: bool = True,
) -> None:
    """Follow each tree by chance: what comes out is distributed as the model says.

    Args:
        predicts, accept_index, accept_token_num: written, as by `accept`.
        candidates: ``[N, L]``, tokens of the drafts.
        retrive_index: ``[N, L]``, numbers of drafts in the batch.
        retrive_next_token: ``[N, L]``, first children.
        retrive_next_sibling: ``[N, L]``.
        uniform_samples: ``[N, L]`` in [0, 1), one for the children of each draft.
        uniform_samples_for_final_sampling: ``[N]``, for the token behind the last one.
        target_probs: ``[N, L, vocabulary]``, what the model says behind each draft.
        draft_probs: not used.
        threshold_single: accept a draft that is at least as likely.
        threshold_acc: divide likelihoods by it, which accepts more.
        deterministic: not used.
    """
    for row, tokens in enumerate(candidates.tolist()):
        path, rejected = [0], list[int]()
        while len(path) < accept_index.shape[1]:
            likely, coin = target_probs[row, path[-1]], uniform_samples[row, path[-1]]
            child, reached = int(retrive_next_token[row, path[-1]]), 0.0
            rejected = []
            while child >= 0:
                own = float(likely[tokens[child]])
                reached += own
                if coin < reached / threshold_acc or own >= threshold_single:
                    break
                rejected.append(tokens[child])
                child = int(retrive_next_sibling[row, child])
            if child < 0:
                break
            path.append(child)
            rejected = []
        left = target_probs[row, path[-1]].clone()
        left[rejected] = 0
        sums = left.cumsum(0)
        coin = uniform_samples_for_final_sampling[row] * sums[-1]
        last = int(torch.searchsorted(sums, coin, right=True).clamp(max=len(left) - 1))
        places = retrive_index[row, path]
        accept_index[row, : len(path)] = places.to(accept_index.dtype)
        chosen = [*(tokens[node] for node in path[1:]), last]
        predicts[places] = torch.tensor(chosen, dtype=predicts.dtype)
        accept_token_num[row] = len(path) - 1


def _parents(
    parent_list: torch.Tensor, chosen: torch.Tensor, topk: int
) -> torch.Tensor:
    """``[N, L]``: the draft that each one follows, -1 for roots."""
    rows, count = chosen.shape
    parents = torch.full((rows, count + 1), -1, dtype=torch.int32)
    if not count:
        return parents
    groups = chosen // topk
    proposals = torch.zeros_like(chosen)
    inner = groups > 0
    if bool(inner.any()):
        proposals = parent_list.gather(1, groups.clamp(max=parent_list.shape[1] - 1))
    # Where its parent's number stands among the chosen ones, in front of it.
    found = (chosen[:, None, :] == proposals[:, :, None]).int()
    parents[:, 1:] = torch.where(inner, found.argmax(2) + 1, 0).to(torch.int32)
    return parents


def _mask(parents: torch.Tensor) -> torch.Tensor:
    """``[N, L, L]``: whether a draft is another one's ancestor, or itself."""
    rows, drafts = parents.shape
    mask = torch.eye(drafts, dtype=torch.bool).repeat(rows, 1, 1)
    every = torch.arange(rows)
    for draft in range(1, drafts):
        mask[:, draft] |= mask[every, parents[:, draft].long()]
    return mask


def _link(
    parents: torch.Tensor, first_child: torch.Tensor, next_sibling: torch.Tensor
) -> None:
    """Write links that lead to all children, in ascending order."""
    first_child.fill_(-1)
    next_sibling.fill_(-1)
    rows, drafts = parents.shape
    every = torch.arange(rows)
    for draft in range(drafts - 1, 0, -1):
        parent = parents[:, draft].long()
        has = parent >= 0
        at = (every[has], parent[has])
        next_sibling[every[has], draft] = first_child[at]
        first_child[at] = draft
