# SPDX-License-Identifier: Apache-2.0
"""Configurations of models that transformers does not know, or not as published."""

from __future__ import annotations

from typing import Any

from hybrid_models.catalogue import CATALOGUE


def register_configs() -> None:
    """Have transformers read them.  Idempotent.

    What it knows by itself stays, unless ours is made of it.
    """
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    for entry in CATALOGUE:
        if not entry.own_config:
            continue
        known: Any = None
        if entry.model_type in CONFIG_MAPPING:
            known = CONFIG_MAPPING[entry.model_type]
        ours: Any = entry.load().CONFIG
        if known is None or (ours is not known and issubclass(ours, known)):
            AutoConfig.register(entry.model_type, ours, exist_ok=True)
