# SPDX-License-Identifier: Apache-2.0
"""What SGLang's speculative workers do otherwise where the plugin serves."""

from __future__ import annotations

from typing import Any

import torch

from hybrid_plugin.device.arena import to_device


def following_tokens(batch: Any, tails: torch.Tensor) -> torch.Tensor:
    """The token behind each prompt's part, which its last draft position takes.

    SGLang puts there what the part's last position samples, but for the one unfinished
    prompt that it knows of.  Where the plugin paused a prompt, it goes on by itself.

    Args:
        batch: SGLang's, of prompts.
        tails: ``[N]``, what SGLang takes.
    """
    rows, tokens = [], []
    for row, req in enumerate(batch.reqs):
        if req.extend_end < len(req.full_untruncated_fill_ids):
            rows.append(row)
            tokens.append(req.full_untruncated_fill_ids[req.extend_end])
    if not rows:
        return tails
    where, what = to_device(torch.tensor([rows, tokens]), tails.device)
    return tails.index_copy(0, where, what.to(tails.dtype))


def with_commands(worker: type) -> type:
    """A class of SGLang's speculative workers that runs the cache's commands.

    Args:
        worker: SGLang's, or a platform's.
    """

    def forward(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        # Not with this module: the plugin is registered before SGLang says where
        # metrics of several processes go, and prometheus-client reads that as it is
        # imported.
        from hybrid_plugin.sglang.prefix_cache import HybridPrefixCache

        run = worker.forward_batch_generation  # type: ignore[attr-defined]
        cache = batch.tree_cache
        if not isinstance(cache, HybridPrefixCache):
            return run(self, batch, *args, **kwargs)
        verifies = batch.forward_mode.is_decode()
        idles = batch.forward_mode.is_idle()
        cache.step_begins(batch)
        result = run(self, batch, *args, **kwargs)
        if verifies:
            cache.drafts.launched(batch, result.speculative_num_draft_tokens)
        if idles:  # a pass of padding, beside ranks that verify
            cache.cache.forget_scratch()
        cache.step_launched(batch)
        return result

    return type(worker.__name__, (worker,), {"forward_batch_generation": forward})
