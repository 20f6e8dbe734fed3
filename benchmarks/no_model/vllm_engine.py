# SPDX-License-Identifier: Apache-2.0
"""vLLM's own engine, scheduler and cache, with nothing behind them.

The model is built without memory, so that the engine sees the layers of the real one;
the executor answers every step at once.  What is restored, evicted and preempted, and
how many steps that takes, is what a GPU would see if all its steps took equally long.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import set_current_vllm_config
from vllm.distributed import (
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.abstract import Executor
from vllm.v1.outputs import ModelRunnerOutput

from benchmarks.no_model.stepping import step_beside
from benchmarks.prefix_workloads import Reply

ANSWER = 7
"""Every token of an answer that is not named."""
_ASKED = "asked"
"""Names a request in what its sampling parameters carry along."""


class NoModel(Executor):
    """Executes nothing: each request that has computed all its tokens gets one more."""

    num_tokens: Callable[[str], tuple[int, int]]
    """Of a request: computed with the step that is scheduled, and known."""
    next_token: Callable[[str], int]
    """Of a request: what it generates now."""

    def _init_executor(self) -> None:
        config = self.vllm_config
        with TemporaryDirectory() as folder, set_current_vllm_config(config):
            place = f"file://{Path(folder) / 'rendezvous'}"
            init_distributed_environment(1, 0, place, 0, "gloo")
            ensure_model_parallel_initialized(1, 1)
            with torch.device("meta"), set_default_torch_dtype(self.model_config.dtype):
                initialize_model(config)

    def get_kv_cache_specs(self) -> list[dict[str, Any]]:
        """Of the layers that keep anything."""
        layers = self.vllm_config.compilation_config.static_forward_context.items()
        specs = {
            name: layer.get_kv_cache_spec(self.vllm_config)
            for name, layer in layers
            if isinstance(layer, AttentionLayerBase)
        }
        return [{name: spec for name, spec in specs.items() if spec is not None}]

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        """Any: there are no bytes to lay out."""
        return [["NHD", "HND", "LBHNC"]]

    def set_kv_cache_layout(self, layout_name: str) -> None:
        """Nothing is laid out."""

    def determine_available_memory(self) -> list[int]:
        """As much as the arguments say."""
        memory: int = self.vllm_config.cache_config.kv_cache_memory_bytes
        return [memory]

    def initialize_from_config(self, kv_cache_configs: Any) -> None:
        """No memory is taken."""

    def compile_or_warm_up_model(self) -> None:
        """There is none."""

    def check_health(self) -> None:
        """Always healthy."""

    def shutdown(self) -> None:
        """Nothing runs."""

    def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        """There are no workers.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(f"there are no workers to do {method!r}")

    def reset_mm_cache(self) -> None:
        """Nothing is cached but text."""

    def execute_model(
        self, scheduler_output: Any, non_block: bool = False
    ) -> ModelRunnerOutput | Future[ModelRunnerOutput]:
        """Answer a step."""
        names = list(scheduler_output.num_scheduled_tokens)
        sampled = []
        for name in names:
            computed, known = self.num_tokens(name)
            whole = computed >= known
            sampled.append(self.sampled(name, scheduler_output) if whole else [])
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
        )
        if not non_block:
            return output
        future: Future[ModelRunnerOutput] = Future()
        future.set_result(output)
        return future

    def sampled(self, name: str, scheduler_output: Any) -> list[int]:
        """What a step gives a request whose tokens are all computed."""
        return [self.next_token(name)]

    def take_draft_token_ids(self) -> Any:
        """Nothing is drafted."""

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        """What the workloads ask for."""
        return ("generate",)


class SteppedEngine:
    """Runs an engine step by step, and counts steps instead of seconds."""

    def __init__(
        self, arguments: dict[str, Any], executor: type[NoModel] = NoModel
    ) -> None:
        """Start one.

        Args:
            arguments: of vLLM's `EngineArgs`.
            executor: what answers its steps.
        """
        arguments = arguments | {"distributed_executor_backend": executor}
        self.engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        core: Any = self.engine.engine_core
        self.scheduler = core.engine_core.scheduler
        executor = core.engine_core.model_executor
        executor.num_tokens, executor.next_token = self._num_tokens, self._next_token
        self.steps = 0
        self.tokens = 0
        """Computed in all steps."""
        self.host_seconds = 0.0
        """CPU time of the scheduler, before and after a step."""
        self._asked = 0
        self._ends: dict[str, asyncio.Future[Any]] = {}
        self._answers: dict[str, Sequence[int]] = {}
        self._first: dict[str, int] = {}
        for method in ("schedule", "update_from_output"):
            setattr(self.scheduler, method, self._timed(method))

    async def ask(
        self, prompt: Sequence[int], max_tokens: int, answer: Sequence[int] = ()
    ) -> Reply:
        """Serve a request; its time to the first token is in steps.

        Args:
            prompt: its tokens.
            max_tokens: to generate.
            answer: those tokens, if they matter.
        """
        self._asked += 1
        name, begin = str(self._asked), self.steps
        self._answers[name] = answer
        sampling = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            extra_args={_ASKED: name},
        )
        request: Any = {"prompt_token_ids": list(prompt)}
        self.engine.add_request(name, request, sampling)
        self._ends[name] = asyncio.get_running_loop().create_future()
        output = await self._ends[name]
        del self._answers[name]
        return Reply(
            tokens=tuple(output.outputs[0].token_ids),
            prompt_tokens=len(prompt),
            cached_tokens=output.num_cached_tokens or 0,
            ttft_s=self._first.pop(name) - begin,
        )

    def drive(self, serving: Coroutine[Any, Any, list[Reply]]) -> list[Reply]:
        """Step until the clients are done."""
        return step_beside(self.run(), serving)

    async def run(self) -> None:
        """Take steps for ever; cancel it."""
        while True:
            await asyncio.sleep(0)  # clients take what the last step gave them
            if not self.engine.has_unfinished_requests():
                continue
            outputs = self.engine.step()
            self.steps += 1
            for output in outputs:
                name = output.request_id
                self._first.setdefault(name, self.steps)
                if output.finished:
                    self._ends.pop(name).set_result(output)

    def shutdown(self) -> None:
        """Let another engine take this one's place in the process."""
        self.engine.engine_core.shutdown()

    def _next_token(self, name: str) -> int:
        request = self.scheduler.requests[name]
        answer = self._answers[request.sampling_params.extra_args[_ASKED]]
        return answer[request.num_output_tokens] if answer else ANSWER

    def _num_tokens(self, name: str) -> tuple[int, int]:
        request = self.scheduler.requests[name]
        return request.num_computed_tokens, request.num_tokens

    def _timed(self, name: str) -> Callable[..., Any]:
        method = getattr(self.scheduler, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.thread_time()
            try:
                result = method(*args, **kwargs)
            finally:
                self.host_seconds += time.thread_time() - begin
            self.tokens += getattr(result, "total_num_scheduled_tokens", 0)
            return result

        return timed
