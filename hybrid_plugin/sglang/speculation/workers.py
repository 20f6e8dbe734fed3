# SPDX-License-Identifier: Apache-2.0
"""What SGLang's speculative workers do otherwise where the plugin serves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from hybrid_plugin.device.arena import to_device
from hybrid_plugin.sglang.speculation import chains


def following_tokens(batch: Any, tails: torch.Tensor) -> torch.Tensor:
    """The token behind each prompt's part, which its last draft position takes.

    SGLang puts there what the part's last position samples, but for the one unfinished
    prompt that it knows of.  Where the plugin paused a prompt, it goes on by itself.  A
    place of an image has no token, and keeps what was sampled, as in SGLang.

    Args:
        batch: SGLang's, of prompts.
        tails: ``[N]``, what SGLang takes.
    """
    rows, tokens = [], []
    for row, req in enumerate(batch.reqs):
        if req.extend_end == len(req.full_untruncated_fill_ids):
            continue
        token = req.full_untruncated_fill_ids[req.extend_end]
        if token < batch.model_config.vocab_size:
            rows.append(row)
            tokens.append(token)
    if not rows:
        return tails
    where, what = to_device(torch.tensor([rows, tokens]), tails.device)
    return tails.index_copy(0, where, what.to(tails.dtype))


def with_commands(worker: type) -> type:
    """A class of SGLang's speculative workers that runs the cache's commands.

    Those for blocks of drafts accept by methods of their own, whose results end at each
    request's first stop.

    Args:
        worker: SGLang's, or a platform's.
    """

    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        self._hybrid_batch = None
        worker.__init__(self, *args, **kwargs)  # type: ignore[misc]
        verifier = vars(self).get("_verify_executor")  # of DSPARK
        if verifier is not None:
            verifier.accept_and_finalize = _ending(
                self, verifier.accept_and_finalize, chains.end_spark
            )
        if hasattr(worker, "_accept_block"):  # of DFLASH
            self._accept_block = _ending(self, self._accept_block, chains.end_flash)

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
        self._hybrid_batch = batch
        if verifies:
            cache.forget_ended(batch)
        cache.step_begins(batch)
        result = run(self, batch, *args, **kwargs)
        self._hybrid_batch = None
        if verifies:
            cache.drafts.launched(batch, result.speculative_num_draft_tokens)
        if idles:  # a pass of padding, beside ranks that verify
            cache.cache.forget_scratch()
        cache.step_launched(batch)
        return result

    members = {"__init__": build, "forward_batch_generation": forward}
    return type(worker.__name__, (worker,), members)


def _ending(
    worker: Any, accept: Callable[..., Any], end: Callable[..., Any]
) -> Callable[..., Any]:
    """A method that accepts drafts, and ends them at each request's first stop.

    Args:
        worker: of `with_commands`.
        accept: SGLang's method, bound; it takes names.
        end: of `chains`, for its result.
    """

    def accepted(*args: Any, **kwargs: Any) -> Any:
        batch = worker._hybrid_batch
        outcome = accept(*args, **kwargs)
        if batch is None:  # of a cache that is not ours
            return outcome
        cut = partial(chains.ended, batch.tree_cache, batch)
        return end(outcome, kwargs["prefix_lens"], cut)

    return accepted
