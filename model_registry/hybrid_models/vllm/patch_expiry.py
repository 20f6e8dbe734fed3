# SPDX-License-Identifier: Apache-2.0
"""In which versions of vLLM each patch of the model classes is needed."""

from __future__ import annotations

from hybrid_plugin.upstream.hookpoints import HookPoint
from hybrid_plugin.upstream.patch_expiry import Need

NEEDED = {
    "registration._patch_arguments": Need(
        HookPoint(
            "vllm.config.model:ModelConfig.__post_init__",
            mentions=("inspect_model_cls",),
        )
    ),
}
