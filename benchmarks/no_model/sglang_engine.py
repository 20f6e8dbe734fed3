# SPDX-License-Identifier: Apache-2.0
"""SGLang's own scheduler, tree and pools, with nothing behind them.

The scheduler runs in this process, on the plugin's CPU platform and without the
plugin; it sizes its pools and admits, retracts, inserts and evicts by its own code.
Its worker answers every step at once.  A process can have one engine.
"""

from __future__ import annotations

import asyncio
import os
from array import array
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

# Chosen for good when SGLang is first imported.
os.environ["SGLANG_PLATFORM"] = "hybrid_cpu"

import sglang
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.output_streamer import (
    SchedulerOutputStreamer,
)
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache import kv_cache_configurator
from sglang.srt.mem_cache.allocator import paged, unified_sub_pool
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, ServerArgs
from sglang.srt.utils import get_num_new_pages

from benchmarks.prefix_workloads import Reply

VERSION: str = sglang.__version__
_TURNS = 5
"""Of the event loop between two steps, so that clients take what they were given."""
_PATIENCE = 200
"""Turns without a step after which something is wrong."""


class _Answers(SchedulerOutputStreamer):  # type: ignore[misc]
    """Tells what a step gave, instead of sending it to other processes."""

    tell: Callable[[Sequence[Any]], None]

    def stream_output(self, reqs: Sequence[Any], *_: Any, **__: Any) -> None:
        """Of requests that may have ended."""
        self.tell(reqs)

    _stream_output_generation = stream_output


class _Scheduler(Scheduler):  # type: ignore[misc]
    def maybe_sleep_on_idle(self) -> None:
        """Clients may have something to ask."""

    def get_output_streamer_class(self) -> type[SchedulerOutputStreamer]:
        return _Answers


class SteppedScheduler:
    """A scheduler that is fed from an event loop."""

    def __init__(self, arguments: dict[str, Any], memory: int) -> None:
        """Start it.

        Args:
            arguments: of SGLang's `ServerArgs`.
            memory: bytes of its pools; it divides them as it would a GPU's.
        """
        pools = kv_cache_configurator.KVCacheConfigurator
        pools._profile_available_bytes = _all_of(memory)
        _serve_unified_memory()
        server_args = ServerArgs(**arguments)
        server_args.resolve_once()
        publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
        ports = PortArgs.init_new(server_args)
        self.scheduler: Any = _Scheduler(server_args, ports)
        self.scheduler.model_worker.forward_batch_generation = self._forward
        self.scheduler.ingest_requests = self._ingest
        self.scheduler.output_streamer.tell = self._tell
        self.steps = 0
        self.tokens = 0
        """Computed in all steps."""
        self._loop = asyncio.new_event_loop()
        self._idle = 0
        """Turns in a row without a step."""
        self._asked: list[Any] = []
        self._answers: dict[str, tuple[int, Sequence[int]]] = {}
        self._ends: dict[str, asyncio.Future[Any]] = {}
        self._serving: asyncio.Task[Any] | None = None

    async def ask(
        self, prompt: Sequence[int], max_tokens: int, answer: Sequence[int]
    ) -> Reply:
        """Serve a request.

        Args:
            prompt: its tokens.
            max_tokens: to generate.
            answer: those tokens.
        """
        name = str(len(self._answers))
        self._answers[name] = (len(prompt), answer)
        self._ends[name] = self._loop.create_future()
        self._asked.append(_request(name, prompt, max_tokens))
        req = await self._ends[name]
        del self._ends[name]
        made = tuple(req.output_ids)
        return Reply(made, len(prompt), int(req.cached_tokens), 0.0)

    def drive(self, serving: Coroutine[Any, Any, list[Reply]]) -> list[Reply]:
        """Run the scheduler until the clients are done."""
        self._serving = self._loop.create_task(serving)
        self.scheduler.gracefully_exit = False
        self.scheduler.run_event_loop()
        return list(self._serving.result())

    def _ingest(self, stop_at_pause: bool = False) -> list[Any]:
        """What SGLang's loop asks for requests before each step."""
        assert self._serving is not None
        self._idle += 1
        if self._idle > _PATIENCE:
            raise RuntimeError("SGLang schedules nothing, and clients wait.")
        for _ in range(_TURNS):
            self._loop.run_until_complete(asyncio.sleep(0))
        asked, self._asked = self._asked, []
        self.scheduler.process_input_requests(asked)
        self.scheduler.gracefully_exit = self._serving.done()
        return asked

    def _tell(self, reqs: Sequence[Any]) -> None:
        """Results of a step; one that ended may come again before it is taken."""
        for req in reqs:
            end = self._ends.get(req.rid)
            if req.finished() and end is not None and not end.done():
                end.set_result(req)

    def _forward(self, batch: Any, **_: Any) -> GenerationBatchResult:
        """A step: the next token of every request, by its length."""
        self.steps += 1
        self._idle = 0
        is_extend = batch.forward_mode.is_extend()
        self.tokens += sum(batch.extend_lens) if is_extend else len(batch.reqs)
        tokens = []
        for req, length in zip(batch.reqs, batch.seq_lens_cpu.tolist(), strict=True):
            prompt, answer = self._answers[req.rid]
            place = length - prompt
            tokens.append(answer[place] if 0 <= place < len(answer) else 0)
        logits = LogitsProcessorOutput(next_token_logits=torch.zeros(len(tokens), 1))
        return GenerationBatchResult(
            logits_output=logits, next_token_ids=torch.tensor(tokens)
        )


def _all_of(memory: int) -> Callable[[Any, int], int]:
    """What SGLang measures of a device: what its states leave for KV, in bytes."""

    def profile(self: Any, before: int) -> int:
        return int(self._handle_max_mamba_cache(memory / 2**30) * 2**30)

    return profile


class _Instead:
    """Stands for a Triton kernel that has no form for CPUs where it is launched."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._function


class _Stream:
    """Nothing runs beside what asks for it."""

    def wait_event(self, event: Any) -> None:
        """It happened."""

    def wait_stream(self, stream: Any) -> None:
        """It is empty."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


def _serve_unified_memory() -> None:
    """Let SGLang's unified pools be built and used without a GPU.

    They are closed to platforms that are not SGLang's, two of their kernels are
    launched without asking for the device, unlike in `PagedTokenToKVPoolAllocator`,
    and they wait for streams of CUDA.
    """
    cuda: Any = torch.cuda
    cuda.current_stream = lambda device=None: _Stream()
    kv_cache_configurator.reject_out_of_tree_path = lambda *_, **__: None

    def extend(
        prefix: Any, lengths: Any, last: Any, free: Any, out: Any, _: int, page: int
    ) -> None:
        paged.alloc_extend_naive(prefix, lengths, last, free, out, page, "cpu")

    def decode(lengths: Any, last: Any, free: Any, out: Any, _: int, page: int) -> None:
        new = get_num_new_pages(seq_lens=lengths, page_size=page, decode=True)
        paged.alloc_decode_naive(lengths, last, free, out, page, new)

    unified_sub_pool.alloc_extend_kernel = _Instead(extend)
    unified_sub_pool.alloc_decode_kernel = _Instead(decode)


def _request(name: str, prompt: Sequence[int], max_tokens: int) -> Any:
    sampling = SamplingParams(max_new_tokens=max_tokens, temperature=0, ignore_eos=True)
    sampling.normalize(None)
    return TokenizedGenerateReqInput(
        rid=name,
        input_text=None,
        input_ids=array("q", prompt),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=sampling,
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=False,
    )
