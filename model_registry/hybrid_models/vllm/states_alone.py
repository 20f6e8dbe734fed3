# SPDX-License-Identifier: Apache-2.0
"""What vLLM decides by lists for models without attention.

One list, by architecture, has what sizes their slots.  Another, by type, says that they
have no heads of attention.
"""

from __future__ import annotations

from vllm.model_executor.models.config import MODELS_CONFIG_MAP, MambaModelConfig
from vllm.transformers_utils.model_arch_config_convertor import (
    MODEL_ARCH_CONFIG_CONVERTORS,
    MambaModelArchConfigConvertor,
)

from hybrid_models.catalogue import Entry


def register(entry: Entry) -> None:
    """Have vLLM treat a model as it treats Mamba.  Idempotent."""
    MODELS_CONFIG_MAP.setdefault(entry.name, MambaModelConfig)
    MODEL_ARCH_CONFIG_CONVERTORS.setdefault(
        entry.model_type, MambaModelArchConfigConvertor
    )
