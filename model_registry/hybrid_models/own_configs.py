# SPDX-License-Identifier: Apache-2.0
"""Configurations of models that transformers does not know."""

from __future__ import annotations

from hybrid_models.catalogue import CATALOGUE


def register_configs() -> None:
    """Have transformers read them.  Idempotent; what it knows by itself stays."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    for entry in CATALOGUE:
        if entry.own_config and entry.model_type not in CONFIG_MAPPING:
            AutoConfig.register(entry.model_type, entry.load().CONFIG)
