# SPDX-License-Identifier: Apache-2.0
"""SGLang's model class around an architecture."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import lru_cache
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.model_executor.runner_utils.forward_batch import set_forward_batch
from sglang.srt.runtime_context import get_server_args
from torch import nn

from hybrid_models import fitting, weights
from hybrid_models.catalogue import Entry
from hybrid_models.sglang import contracts
from hybrid_models.sglang.kit import SglangKit
from hybrid_models.sglang.patches import patch_graph_layers


@lru_cache
def model_class(entry: Entry) -> type[nn.Module]:
    """The class that SGLang builds for an architecture."""
    fitting.require("SGLang", contracts.problems(contracts.BUILD_HOOKS))
    architecture = entry.load()

    class Model(nn.Module):
        """A model of `hybrid_models` in SGLang."""

        packed_modules_mapping = architecture.NAMES.packed

        def __init__(
            self, config: Any, quant_config: Any = None, prefix: str = ""
        ) -> None:
            super().__init__()
            patch_graph_layers()
            # Dummies are no checkpoint; what comes later may come in parts.
            self.has_weights = get_server_args().load_format == weights.DUMMY
            self.config = config
            kit = SglangKit(config, quant_config)
            outer = f"{prefix}." if prefix else ""
            self.model = architecture(config, kit, name=f"{outer}model")
            self.lm_head = kit.head(
                config.vocab_size,
                config.hidden_size,
                name=f"{outer}lm_head",
                tied=self.model.embed_tokens if config.tie_word_embeddings else None,
            )
            self.window = one_window(kit.windows)
            scale = architecture.logit_scale(config)
            self.logits_processor = LogitsProcessor(
                config, logit_scale=None if scale == 1.0 else scale
            )

        def get_input_embeddings(self) -> nn.Module:
            return self.model.embed_tokens

        def get_attention_sliding_window_size(self) -> int | None:
            return self.window

        @torch.no_grad()
        def forward(
            self,
            input_ids: torch.Tensor,
            positions: torch.Tensor,
            forward_batch: Any,
            input_embeds: torch.Tensor | None = None,
            **_: Any,
        ) -> Any:
            with set_forward_batch(forward_batch):
                hidden = self.model(input_ids, positions, input_embeds)
            return self.logits_processor(input_ids, hidden, self.lm_head, forward_batch)

        def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
            weights.update(self, tensors, architecture.NAMES)

    Model.__name__ = Model.__qualname__ = entry.name
    return Model


def one_window(windows: Collection[int]) -> int | None:
    """What SGLang's attention is told of windows, once for all layers.

    Args:
        windows: of the layers that have one, in tokens.

    Returns:
        None without any.

    Raises:
        ValueError: if layers have windows of several sizes.
    """
    if len(windows) > 1:
        sizes = ", ".join(str(window + 1) for window in sorted(windows))
        raise ValueError(
            f"SGLang serves one window for all layers that have any, not {sizes} tokens"
        )
    return next(iter(windows), None)
