# SPDX-License-Identifier: Apache-2.0
"""The two engines in this process, asked for logprobs."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.passes.engines import Running
from tests.gpu.determinism.prompts import ANSWER, LONGEST, Prompt
from tests.gpu.determinism.record import Answer

ON_GPU = torch.cuda.is_available()
MAX_RUNNING = 32
CACHE_TOKENS, STATE_SLOTS = 65_536, 128
"""Of SGLang's pools."""
CACHE_BYTES = (4 << 30) if ON_GPU else (96 << 20)
"""Of vLLM's."""

Ask = Callable[[Prompt], Coroutine[Any, Any, Answer]]


@dataclass(frozen=True)
class Setup:
    """One engine's configuration."""

    engine: str
    """"vllm" or "sglang"."""
    model: Path
    dtype: str
    chunk: int
    """Tokens of a pass at most."""
    options: Mapping[str, Any] | None
    """Of the plugin; None for the engine alone."""
    flags: Mapping[str, Any]
    """Of the engine, in its own words."""

    @property
    def vocabulary(self) -> int:
        """Tokens that the model knows."""
        config = json.loads((self.model / "config.json").read_text())
        return int(config["vocab_size"])

    def arguments(self) -> dict[str, Any]:
        """Of the engine."""
        common = {"skip_tokenizer_init": True, "dtype": self.dtype}
        own = self._vllm() if self.engine == "vllm" else self._sglang()
        return common | own | dict(self.flags)

    def _vllm(self) -> dict[str, Any]:
        on_gpu = {"gdn_prefill_backend": "triton", "gpu_memory_utilization": 0.1}
        found: dict[str, Any] = {
            "model": str(self.model),
            "seed": 0,
            "max_model_len": LONGEST + ANSWER,
            "max_num_seqs": MAX_RUNNING,
            "max_num_batched_tokens": self.chunk,
            "max_logprobs": self.vocabulary,
            "kv_cache_memory_bytes": CACHE_BYTES,
            **(on_gpu if ON_GPU else {"enforce_eager": True}),
        }
        if self.options is not None:
            found["additional_config"] = {"hybrid_plugin": dict(self.options)}
        return found

    def _sglang(self) -> dict[str, Any]:
        on_gpu = {
            "attention_backend": "triton",
            "sampling_backend": "pytorch",
            "disable_flashinfer_autotune": True,
            "mem_fraction_static": 0.3,
            "cuda_graph_bs_decode": [1, 2, 4, 8, 16, 32],
        }
        pools = {
            "max_total_tokens": CACHE_TOKENS,
            "max_mamba_cache_size": STATE_SLOTS,
        }
        elastic = (self.options or {}).get("elastic")
        return {
            "model_path": str(self.model),
            "random_seed": 0,
            "context_length": LONGEST + ANSWER,
            "max_running_requests": MAX_RUNNING,
            "chunked_prefill_size": self.chunk,
            "log_level": "warning",
            **(on_gpu if ON_GPU else {}),
            **({} if elastic else pools),
        }

    def set_environment(self) -> None:
        """Of this process, before the engine is imported."""
        active = self.options is not None
        os.environ |= {
            "HYBRID_PLUGIN": "1" if active else "0",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        if self.engine == "vllm":
            os.environ |= {
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "VLLM_LOGGING_STREAM": "ext://sys.stderr",
                # This process asked CUDA for its devices; a fork of it cannot use them.
                "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            }
        if self.engine == "vllm" and "deterministic" in (self.options or {}):
            # vLLM on its own refuses state layers in this mode.
            os.environ |= {
                "VLLM_BATCH_INVARIANT": "1",
                "VLLM_USE_BREAKABLE_CUDAGRAPH": "1",
            }
        if self.engine == "sglang" and active:
            os.environ["HYBRID_CONFIG"] = json.dumps(dict(self.options or {}))
        if self.engine == "sglang" and not active and not ON_GPU:
            os.environ["SGLANG_PLATFORM"] = "hybrid_cpu"


def _ask_vllm(running: Running, top: int) -> Ask:
    from vllm import SamplingParams

    async def ask(prompt: Prompt) -> Answer:
        sampling = SamplingParams(
            temperature=0,
            max_tokens=prompt.answer,
            ignore_eos=True,
            detokenize=False,
            logprobs=top,
        )
        request = {"prompt_token_ids": list(prompt.tokens)}
        name = f"{random.getrandbits(64):x}"
        output: Any = None
        async for step in running.engine.generate(request, sampling, name):
            output = step
        (choice,) = output.outputs
        return Answer(
            tuple(choice.token_ids),
            tuple(
                {token: found.logprob for token, found in row.items()}
                for row in choice.logprobs
            ),
            output.num_cached_tokens or 0,
        )

    return ask


def _ask_sglang(running: Running, top: int) -> Ask:
    async def ask(prompt: Prompt) -> Answer:
        answer = await running.engine.async_generate(
            input_ids=list(prompt.tokens),
            sampling_params={
                "temperature": 0,
                "max_new_tokens": prompt.answer,
                "ignore_eos": True,
            },
            return_logprob=True,
            top_logprobs_num=top,
        )
        about = answer["meta_info"]
        return Answer(
            tuple(answer["output_ids"]),
            tuple(
                {token: logprob for logprob, token, _ in row}
                for row in about["output_top_logprobs"]
            ),
            about["cached_tokens"],
        )

    return ask


async def _forget(setup: Setup, running: Running) -> None:
    """Have the engine forget everything cached.

    Raises:
        RuntimeError: if it does not.
    """
    if setup.engine == "vllm":
        done = await running.engine.reset_prefix_cache()
    else:
        done = (await running.engine.tokenizer_manager.flush_cache()).success
    if not done:
        raise RuntimeError("the engine did not forget its cache.")


GROUPS = {f"groups-of-{size}": size for size in (2, 9, 24)}
"""Prompts at once; the second is between the sizes of CUDA graphs."""
MODES = ("alone", "warm", "crowd", "warm-crowd", *GROUPS)
"""Ways to ask: one by one, each with nothing cached; one by one, after another mode;
all at once, with nothing cached before; all at once, after another mode; a few at once,
with nothing cached before."""


async def ask_all(
    setup: Setup,
    running: Running,
    prompts: Sequence[Prompt],
    mode: str,
    top: int,
    order: int,
) -> list[Answer]:
    """Ask for everything in one of the modes.

    Args:
        setup: of the engine.
        running: the engine.
        prompts: that are asked.
        mode: one of `MODES`.
        top: logprobs of a token.
        order: seed of the order in which a crowd arrives.

    Returns:
        Answers in the order of the prompts.
    """
    ask = (_ask_vllm if setup.engine == "vllm" else _ask_sglang)(running, top)
    if mode == "alone" or mode in GROUPS:
        size, found = GROUPS.get(mode, 1), list[Answer]()
        for start in range(0, len(prompts), size):
            await _forget(setup, running)
            together = map(ask, prompts[start : start + size])
            found += await asyncio.gather(*together)
        return found
    if mode == "warm":
        return [await ask(prompt) for prompt in prompts]
    if mode == "crowd":
        await _forget(setup, running)
    numbers = list(range(len(prompts)))
    random.Random(order).shuffle(numbers)
    answers = await asyncio.gather(*(ask(prompts[number]) for number in numbers))
    by_number = dict(zip(numbers, answers, strict=True))
    return [by_number[number] for number in range(len(prompts))]
