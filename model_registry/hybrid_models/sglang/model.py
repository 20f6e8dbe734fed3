# SPDX-License-Identifier: Apache-2.0
"""SGLang's model class around an architecture."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.model_executor.runner_utils.forward_batch import set_forward_batch
from torch import nn

from hybrid_models import fitting, weights
from hybrid_models.catalogue import Entry
from hybrid_models.sglang import contracts
from hybrid_models.sglang.kit import SglangKit


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
            scale = architecture.logit_scale(config)
            self.logits_processor = LogitsProcessor(
                config, logit_scale=None if scale == 1.0 else scale
            )

        def get_input_embeddings(self) -> nn.Module:
            return self.model.embed_tokens

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
            count = self.config.num_hidden_layers
            weights.load(self, tensors, architecture.NAMES, layers=count)

    Model.__name__ = Model.__qualname__ = entry.name
    return Model
