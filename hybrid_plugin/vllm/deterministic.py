# SPDX-License-Identifier: Apache-2.0
"""What the option `deterministic` needs of vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hybrid_plugin.config import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def obstacles(vllm_config: VllmConfig) -> Iterator[str]:
    """Sentences about what of this configuration makes answers depend on the batch."""
    from vllm import envs
    from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        yield "deterministic is promised on a GPU only; leave it out."
    if not envs.VLLM_BATCH_INVARIANT:
        yield (
            "deterministic needs vLLM's own batch-invariant mode for everything beside "
            "the state layers; set VLLM_BATCH_INVARIANT=1."
        )
    if not (is_breakable_cudagraph_enabled() or vllm_config.model_config.enforce_eager):
        # Inductor chooses tiles from the most tokens of a pass and from timings.
        yield (
            "deterministic needs vLLM's own kernels throughout, and torch.compile "
            "makes others for each --max-num-batched-tokens; set "
            "VLLM_USE_BREAKABLE_CUDAGRAPH=1."
        )
    if vllm_config.scheduler_config.policy != "fcfs":
        yield (
            "deterministic admits nobody who might be preempted, and priorities do "
            "preempt; drop --scheduling-policy."
        )
    if vllm_config.lora_config is not None:
        yield "deterministic is not served with LoRA adapters; drop --enable-lora."
    pictures = vllm_config.model_config.multimodal_config
    if pictures is not None and not pictures.language_model_only:
        yield (
            "deterministic serves text alone, for vLLM cuts a prompt before an image "
            "whenever others leave its encoder no room; give --language-model-only, or "
            "leave it out."
        )


def check_attention(vllm_config: VllmConfig) -> None:
    """Require attention whose bits were compared.

    Args:
        vllm_config: of the engine, whose layers exist.

    Raises:
        ConfigError: for another backend.
    """
    from vllm.platforms import current_platform

    backends = current_platform._find_non_ssm_backends(vllm_config)
    others = sorted({backend.get_name() for backend in backends} - {"FLASH_ATTN"})
    if others:
        raise ConfigError(
            f"deterministic: which bits {', '.join(others)} gives in a crowd was not "
            "compared; use --attention-backend FLASH_ATTN."
        )


def check_budget(vllm_config: VllmConfig, step: int) -> None:
    """Require passes to have room for a whole chunk beside all that decode.

    Args:
        vllm_config: of the engine.
        step: tokens of a chunk that ends where pages and kernels' chunks end.

    Raises:
        ConfigError: if a prompt might wait for ever.
    """
    scheduling = vllm_config.scheduler_config
    least = scheduling.max_num_seqs + step
    if scheduling.max_num_batched_tokens < least:
        raise ConfigError(
            f"deterministic computes prompts in whole chunks of {step} tokens, which a "
            f"pass of {scheduling.max_num_batched_tokens} tokens may have no room for "
            f"beside {scheduling.max_num_seqs} sequences: set --max-num-batched-tokens "
            f"to {least} at least, or lower --max-num-seqs."
        )
    # The last token of a prompt is never left to a pass of its own.
    share = scheduling.long_prefill_token_threshold
    if 0 < share <= step:
        raise ConfigError(
            f"deterministic computes prompts in whole chunks of {step} tokens, and "
            f"--long-prefill-token-threshold lets a pass have {share} of one: set it "
            f"to {step + 1} at least, or drop it."
        )
