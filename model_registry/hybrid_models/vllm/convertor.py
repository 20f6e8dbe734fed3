# SPDX-License-Identifier: Apache-2.0
"""What vLLM reads off configurations of models with latent attention.

It knows them by a list of types, which decides what its caches hold.
"""

from __future__ import annotations

from vllm.platforms import current_platform
from vllm.transformers_utils.model_arch_config_convertor import (
    MODEL_ARCH_CONFIG_CONVERTORS,
    ModelArchConfigConvertorBase,
)

from hybrid_models.catalogue import Entry


class LatentConvertor(ModelArchConfigConvertorBase):
    """Of a model that keeps latent vectors; on a CPU, keys and values made of them.

    vLLM's attention over vectors takes no parts of prompts on a CPU.
    """

    def is_deepseek_mla(self) -> bool:
        """Whether vectors are kept."""
        return not current_platform.is_cpu()

    def get_head_size(self) -> int:
        """Of what is kept."""
        if self.is_deepseek_mla():
            size: int = super().get_head_size()
            return size
        config = self.hf_text_config
        return int(config.qk_nope_head_dim + config.qk_rope_head_dim)

    def get_total_num_kv_heads(self) -> int:
        """As many as of queries."""
        return int(self.hf_text_config.num_attention_heads)


def register(entry: Entry) -> None:
    """Have vLLM read a model's configuration so.  Idempotent."""
    MODEL_ARCH_CONFIG_CONVERTORS.setdefault(entry.model_type, LatentConvertor)
