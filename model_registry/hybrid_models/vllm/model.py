# SPDX-License-Identifier: Apache-2.0
"""vLLM's model class around an architecture."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import nn
from vllm.compilation.decorators import support_torch_compile
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec
from vllm.model_executor.models.interfaces import (
    HasInnerState,
    IsAttentionFree,
    IsHybrid,
    SupportsLoRA,
    SupportsQuant,
)
from vllm.model_executor.models.utils import WeightsMapper, maybe_prefix

from hybrid_models import fitting, weights
from hybrid_models.architecture import Architecture
from hybrid_models.catalogue import Entry
from hybrid_models.vllm import adapters, contracts
from hybrid_models.vllm.kit import VllmKit, placement


@lru_cache
def model_class(entry: Entry) -> type[nn.Module]:
    """The class that vLLM builds for an architecture."""
    fitting.require("vLLM", contracts.problems(contracts.BUILD_HOOKS))
    architecture = entry.load()
    backbone = _backbone(architecture)
    kind: Any = IsAttentionFree if entry.has_states_alone else IsHybrid

    class Model(
        nn.Module, HasInnerState, kind, SupportsLoRA, SupportsQuant
    ):  # their methods and attributes are below
        """A model of `hybrid_models` in vLLM."""

        packed_modules_mapping = architecture.NAMES.packed
        hf_to_vllm_mapper = WeightsMapper(
            orig_to_new_substr=dict(architecture.NAMES.renames)
        )
        embedding_modules: ClassVar[dict[str, str]] = {
            "embed_tokens": "input_embeddings",
            "lm_head": "output_embeddings",
        }

        def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
            super().__init__()
            _refuse_drafts(vllm_config)
            # Dummies are no checkpoint; what comes later may come in parts.
            self.has_weights = vllm_config.load_config.load_format == weights.DUMMY
            config = vllm_config.model_config.hf_text_config
            self.config = config
            model: Any = backbone(
                vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model")
            )
            self.model = model
            self.lm_head = VllmKit(vllm_config).head(
                config.vocab_size,
                config.hidden_size,
                name=maybe_prefix(prefix, "lm_head"),
                tied=model.embed_tokens if config.tie_word_embeddings else None,
            )
            adapters.check(vllm_config, self)
            if vllm_config.lora_config is not None:
                self.packed_modules_mapping = adapters.with_single(
                    architecture.NAMES.packed, self
                )
            self.logits_processor = LogitsProcessor(
                config.vocab_size,
                scale=architecture.logit_scale(config),
                soft_cap=architecture.logit_cap(config),
            )

        def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
            embed: Any = self.model.embed_tokens
            result: torch.Tensor = embed(input_ids)
            return result

        def forward(
            self,
            input_ids: torch.Tensor | None,
            positions: torch.Tensor,
            intermediate_tensors: Any = None,
            inputs_embeds: torch.Tensor | None = None,
            **_: Any,
        ) -> torch.Tensor:
            hidden: torch.Tensor = self.model(
                input_ids, positions, intermediate_tensors, inputs_embeds
            )
            return hidden

        def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
            logits: torch.Tensor | None
            logits = self.logits_processor(self.lm_head, hidden_states)
            return logits

        def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
            return weights.update(self, tensors, architecture.NAMES)

        @classmethod
        def get_mamba_state_shape_from_config(
            cls, vllm_config: Any
        ) -> tuple[tuple[int, ...], ...]:
            return tuple(t.shape for t in _tensors(architecture, vllm_config))

        @classmethod
        def get_mamba_state_dtype_from_config(
            cls, vllm_config: Any
        ) -> tuple[torch.dtype, ...]:
            return tuple(t.dtype for t in _tensors(architecture, vllm_config))

        @classmethod
        def get_mamba_state_copy_func(cls) -> tuple[Callable[..., Any], ...]:
            return (get_temporal_copy_spec,) * architecture.STATES

    _name(Model, entry.name)
    return Model


def _backbone(architecture: type[Architecture]) -> type[nn.Module]:
    """The architecture, with the constructor and `forward` that vLLM compiles."""

    class Backbone(architecture):  # type: ignore[misc,valid-type]
        """What vLLM compiles."""

        def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
            super().__init__(
                vllm_config.model_config.hf_text_config,
                VllmKit(vllm_config),
                name=prefix,
            )

        def forward(
            self,
            input_ids: torch.Tensor | None,
            positions: torch.Tensor,
            intermediate_tensors: Any = None,
            inputs_embeds: torch.Tensor | None = None,
        ) -> torch.Tensor:
            hidden: torch.Tensor = super().forward(input_ids, positions, inputs_embeds)
            return hidden

    _name(Backbone, architecture.__name__)
    compiled: type[nn.Module] = support_torch_compile(
        dynamic_arg_dims={"input_ids": 0, "positions": -1, "inputs_embeds": 0}
    )(Backbone)
    return compiled


def _name(cls: type, name: str) -> None:
    cls.__name__ = cls.__qualname__ = name


def _tensors(architecture: type[Architecture], vllm_config: Any) -> Any:
    config = vllm_config.model_config.hf_text_config
    return architecture.state_tensors(config, placement(vllm_config))


def _refuse_drafts(vllm_config: Any) -> None:
    """Raises ValueError where drafts would be verified: no mixer is told of them."""
    if vllm_config.num_speculative_tokens:
        raise ValueError(
            "model classes of hybrid-plugin do not verify drafts yet: start the server "
            "without --speculative-config"
        )
