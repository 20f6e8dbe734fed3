# SPDX-License-Identifier: Apache-2.0
"""Our classes of the architectures that SGLang lacks."""

from __future__ import annotations

from hybrid_models.sglang.model import model_class
from hybrid_models.sglang.registration import chosen

EntryClass = [model_class(entry) for entry in chosen()]
