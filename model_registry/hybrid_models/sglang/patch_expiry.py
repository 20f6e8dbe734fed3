# SPDX-License-Identifier: Apache-2.0
"""In which versions of SGLang each patch of the model classes is needed."""

from __future__ import annotations

from hybrid_plugin.upstream.hookpoints import HookPoint
from hybrid_plugin.upstream.patch_expiry import Need

NEEDED = {
    "registration._offer_classes": Need(
        HookPoint("sglang.srt.environ:Envs.SGLANG_EXTERNAL_MODEL_PACKAGE")
    ),
    "patches.patch_graph_layers": Need(
        HookPoint(
            "sglang.srt.model_executor.model_runner:ModelRunner.get_cuda_graph_layers",
            mentions=("compute_attention_and_moe_layers",),
        )
    ),
    "patches.patch_shapes": Need(
        HookPoint("sglang.srt.configs.model_config:PURE_SSM_ARCHITECTURES")
    ),
}
