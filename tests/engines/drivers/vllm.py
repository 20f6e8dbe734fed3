# SPDX-License-Identifier: Apache-2.0
"""`vllm serve`, over its OpenAI API."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from signal import SIGTERM
from typing import Any

import httpx
import torch

from hybrid_plugin.tools.demo.compare import NEAR_TIE
from tests.engines import web
from tests.engines.drivers.driver import (
    MAX_MODEL_LEN,
    Decision,
    Model,
    Refusal,
    Setup,
    Stages,
    Variant,
)
from tests.engines.drivers.process import environment, overheard
from tests.engines.faults import planted
from tests.engines.messages import Answer, Ask, Launch

ON_GPU = torch.cuda.is_available()
PAGE_SIZE = 16 if ON_GPU else 32
"""The least that the platform's attention backend takes."""

FLAGS = (
    f"--max-model-len={MAX_MODEL_LEN}",
    "--max-num-batched-tokens=96",
    "--kv-cache-memory-bytes=64M",
    "--host=127.0.0.1",
    "--enable-prompt-tokens-details",
    *(
        (
            "--gdn-prefill-backend=triton",
            "--gpu-memory-utilization=0.2",
            "--cudagraph-capture-sizes",
            "1",
            "4",
            "16",
        )
        if ON_GPU
        else ("--enforce-eager",)
    ),
)

_IMPORTS = (
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.openai.api_server",
    "vllm.entrypoints.openai.responses.api_router",
    "vllm.entrypoints.rl.factories",
    "vllm.entrypoints.serve.sagemaker.api_router",
    "vllm.model_executor.models.nemotron_h",
    "vllm.model_executor.models.qwen3_next",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "hybrid_plugin.vllm.cpu_worker",
    "hybrid_plugin.vllm.scheduler",
    "tests.engines.drivers.vllm_imports",
)
IMPORTS = () if ON_GPU else _IMPORTS
"""What a server's processes import.  None on a GPU: importing them takes hold of its
driver, which a forked process cannot use."""

PREEMPTION = "smallest page, preemption"
DOUBLE_PAGE = "double page"
OUR_KERNELS = "our kernels"
IN_TURNS = "our kernels and the engine's in turns"
STAGES = "elastic, stages of a pipeline"
OTHER_STAGES = "stages that differ, preemption"

MODELS = {
    "gated delta net, bfloat16": Model(
        "bundled",
        "bfloat16",
        NEAR_TIE,
        stray=3,
        quick=None if ON_GPU else (PREEMPTION, DOUBLE_PAGE, OUR_KERNELS),
    ),
    "mamba-2, float32": Model(
        "nemotron_h",
        "float32",
        0.0,
        quick=None
        if ON_GPU
        else (PREEMPTION, DOUBLE_PAGE, IN_TURNS, STAGES, OTHER_STAGES),
    ),
}
"""vLLM's gated delta net kernels take bfloat16 only, whose logits are 0.0625 to
0.125 apart; `control.py` prints how far stock vLLM is from itself there.  One of
the 150 answers is often 0.8 nats off: its logits move by 0.3 with how a prompt is split
into chunks alone.  On a CPU without AVX-512, where the stock engine is farther from
itself, three answers may be as far off."""

GRAPH_SIZES = ("--cudagraph-capture-sizes", "1", "4", "16", "32", "64", "96")

VARIANTS = {
    PREEMPTION: Variant(
        # Few pages, and now and then a request for one is refused.
        {},
        0.05,
        pools=(1280 // PAGE_SIZE, 12),
        fault="refuse_pages",
        preempts=True,
    ),
    DOUBLE_PAGE: Variant({"page_size": 2 * PAGE_SIZE}, 0.4),
    OUR_KERNELS: Variant({"kernels": "ours"}, 0.4),
    IN_TURNS: Variant(
        {"kernels": "ours"},
        0.4,
        fault="short_prefills_are_ours",
        says="prefill of up to 40 tokens",
    ),
}
IN_STAGES = ("--pipeline-parallel-size=2",)
if not ON_GPU:
    VARIANTS[STAGES] = Variant(
        {"kernels": "ours", "elastic": True, "gpu_memory_budget": 18 << 20},
        0.3,
        IN_STAGES,
    )
    VARIANTS[OTHER_STAGES] = Variant(
        {},
        0.05,
        IN_STAGES,
        # Three state layers and one, for the models of ten layers.
        {"VLLM_PP_LAYER_PARTITION": "7,3"},
        pools=(1280 // PAGE_SIZE, 12),
        fault="refuse_pages",
        preempts=True,
    )
if ON_GPU:  # the CPU platform forces synchronous scheduling
    VARIANTS["synchronous"] = Variant({}, 0.4, ("--no-async-scheduling",))
    VARIANTS["elastic"] = Variant({"elastic": True, "gpu_memory_budget": 18 << 20}, 0.3)
    VARIANTS["our kernels, elastic"] = Variant(
        {"kernels": "ours", "elastic": True, "gpu_memory_budget": 18 << 20}, 0.3
    )
    VARIANTS["page of 64"] = Variant({"page_size": 64}, 0.4)
    VARIANTS["prefill graphs"] = Variant(
        {"kernels": "ours", "prefill_graphs": True},
        0.4,
        GRAPH_SIZES,
    )

STAGED_ELASTIC = "elastic"
STAGED_LITTLE = "elastic, little memory"
STAGED_FIXED = "fixed pools, preemption"
STAGED_OURS = "our kernels, fixed pools"
STAGED_GRAPHS = "prefill graphs, elastic"
STAGED_SYNCHRONOUS = "synchronous"
STAGED = {
    STAGED_ELASTIC: Variant(
        {"elastic": True, "gpu_memory_budget": (14 if ON_GPU else 9) << 20}, 0.3
    ),
    STAGED_LITTLE: Variant(
        {"elastic": True, "gpu_memory_budget": (10 if ON_GPU else 2) << 20}, 0.02
    ),
    STAGED_FIXED: Variant(
        {},
        0.05,
        pools=(1280 // PAGE_SIZE, 12),
        fault="refuse_pages",
        preempts=True,
    ),
    STAGED_OURS: Variant({"kernels": "ours", "elastic": False}, 0.4),
}
if ON_GPU:
    STAGED[STAGED_GRAPHS] = Variant(
        {
            "kernels": "ours",
            "prefill_graphs": True,
            "elastic": True,
            "gpu_memory_budget": 14 << 20,
        },
        0.3,
        GRAPH_SIZES,
        says="passes with prefills",
    )
    STAGED[STAGED_SYNCHRONOUS] = Variant({}, 0.4, ("--no-async-scheduling",))
STAGES_OF_A_PIPELINE = Stages(
    IN_STAGES,
    {
        "mamba-2, float32": Model(
            "nemotron_h",
            "float32",
            0.0,
            quick=(STAGED_ELASTIC, STAGED_FIXED, STAGED_LITTLE),
        ),
        "gated delta net, bfloat16": Model(
            "bundled", "bfloat16", NEAR_TIE, stray=3, quick=(STAGED_GRAPHS,)
        ),
    },
    STAGED,
    elastic_budget=(10 if ON_GPU else 2) << 20,
)
"""A stage of the first model has a layer with attention and two with states: of a GPU's
blocks, one holds 4096 tokens or eight slots."""

REFUSALS = {
    "page size the backend refuses": Refusal(
        "Page size 16 does not suit the attention backend (CPU_ATTN), which takes "
        "32, 64, 96, 128, ...",
        {"page_size": 16},
    ),
    "pool too small for one sequence": Refusal(
        "cannot hold one sequence of 1024 tokens",
        flags=("--kv-cache-memory-bytes=1M",),
    ),
    "elastic pools too small for one sequence": Refusal(
        "elastic pools do not fit: ",
        {"elastic": True, "gpu_memory_budget": 1 << 20},
    ),
    "more host memory than the machine has": Refusal(
        "host_memory of 1048576.00 GiB is more than this machine has free, ",
        {"host_memory": "1024TiB"},
    ),
    "plugin excluded from the workers": Refusal(
        "hybrid-plugin is loaded in the server but not in", fault="exclude_workers"
    ),
}


CONFLICTS = {
    "drafts in stages": (
        (
            "--pipeline-parallel-size=2",
            "--speculative-config",
            '{"method": "ngram", "num_speculative_tokens": 2}',
        ),
        "drafts are not served with pipeline parallelism yet; drop "
        "--speculative-config.",
    ),
    "scheduler class": (
        ("--scheduler-cls=vllm.v1.core.sched.scheduler.Scheduler",),
        "it brings its own scheduler; drop --scheduler-cls.",
    ),
    **(
        {}
        if ON_GPU
        else {
            "KV with scales": (
                ("--kv-cache-dtype=int8_per_token_head",),
                "vLLM's attention on CPUs misreads KV of this type; drop "
                "--kv-cache-dtype.",
            )
        }
    ),
    "connector": (
        (
            "--kv-transfer-config",
            '{"kv_connector": "ExampleConnector", "kv_role": "kv_both"}',
        ),
        "vLLM's KV connectors do not know the plugin's pools; drop "
        "--kv-transfer-config, and for prefill and decode servers give the option "
        "peers.",
    ),
}

FRESH = ("additional_config", "instance_id")
"""Fields that are ours, or new in every configuration."""


class VllmDriver:
    """A `Driver`."""

    name = "vllm"
    last_signal = SIGTERM
    page_size = PAGE_SIZE
    elastic_budget = (14 << 20) if ON_GPU else (7 << 19)
    offloading = ("--kv-offloading-size=0.0625",)
    models = MODELS
    variants = VARIANTS
    stages = STAGES_OF_A_PIPELINE
    refusals: Mapping[str, Refusal] = {} if ON_GPU else REFUSALS
    """The sentences name the CPU's backend."""

    conflicts = CONFLICTS

    def decide(self, setup: Setup, *, demanded: bool = False) -> Decision:
        """As far as vLLM's configuration goes."""
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        from hybrid_plugin.vllm.activation import is_active

        options = dict(setup.options) | ({"enabled": True} if demanded else {})
        flags = [
            f"--model={setup.model}",
            "--skip-tokenizer-init",
            f"--dtype={setup.dtype}",
            f"--max-model-len={MAX_MODEL_LEN}",
            *(() if setup.prefix_cache else ("--no-enable-prefix-caching",)),
            *setup.flags,
            "--additional-config",
            json.dumps({"hybrid_plugin": options} if options else {}),
        ]
        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        with overheard("vllm.hybrid_plugin") as lines, environment(setup.plugin):
            try:
                arguments = EngineArgs.from_cli_args(parser.parse_args(flags))
                config = arguments.create_engine_config()
            except (ValueError, SystemExit) as refusal:
                return Decision(refusal=str(refusal), lines=tuple(lines))
        settings = {
            f"{section}.{name}": value
            for section in ("scheduler_config", "cache_config", "parallel_config")
            for name, value in vars(getattr(config, section)).items()
            if name not in FRESH and not name.startswith("_data_parallel")
        }
        return Decision(is_active(config), None, tuple(lines), settings)

    def launch(self, setup: Setup, port: int) -> Launch:
        """The command line of `vllm serve`."""
        command = [
            str(Path(sys.executable).with_name("vllm")),
            "serve",
            str(setup.model),
            f"--port={port}",
            f"--dtype={setup.dtype}",
            f"--max-num-seqs={setup.max_running}",
            *FLAGS,
            *(() if setup.prefix_cache else ("--no-enable-prefix-caching",)),
            *setup.flags,
        ]
        options = dict(setup.options)
        if setup.pools is not None:
            options["elastic"] = False
        if options:
            command += ["--additional-config", json.dumps({"hybrid_plugin": options})]
        variables = {
            "HYBRID_PLUGIN": "1" if setup.plugin else "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
            "HF_HUB_OFFLINE": "1",
        }
        if setup.dtype == "float32":
            # Without it, Triton rounds float32 operands to 10 bits of mantissa.
            variables["TRITON_F32_DEFAULT"] = "ieee"
        variables |= setup.environment
        return Launch(
            command,
            variables | planted(setup.fault, setup.pools),
            () if setup.cold else IMPORTS,
        )

    async def stream(self, client: httpx.AsyncClient, ask: Ask) -> Answer:
        """Over /v1/completions."""
        body = _body(ask) | {"stream": True, "stream_options": {"include_usage": True}}
        tokens: list[int] = []
        logprobs: list[Mapping[int, float]] = []
        usage: dict[str, Any] = {}
        begin, first = time.monotonic(), 0.0
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode()
                return Answer((), error=f"{response.status_code}: {text}")
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    return Answer(tuple(tokens), error=str(event["error"]))
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    tokens += choice.get("token_ids") or []
                    logprobs += _read_logprobs(choice)
                if tokens and not first:
                    first = time.monotonic() - begin
                if ask.abort_after is not None and len(tokens) >= ask.abort_after:
                    return Answer(tuple(tokens), ttft_s=first, aborted=True)
        return Answer(
            tokens=tuple(tokens),
            prompt_tokens=usage.get("prompt_tokens", 0),
            cached_tokens=_cached(usage),
            ttft_s=first,
            logprobs=tuple(logprobs),
        )

    def cached_with_prompt_logprobs(self, url: str, prompt: Sequence[int]) -> int:
        """Such a request cannot be streamed."""
        body = _body(Ask(tuple(prompt), 4)) | {"prompt_logprobs": 1}
        response = web.post(f"{url}/v1/completions", json=body, timeout=300)
        response.raise_for_status()
        return _cached(response.json()["usage"])

    def pause(self, url: str) -> None:
        """By vLLM's development mode."""
        web.post(f"{url}/pause?mode=keep", timeout=60).raise_for_status()

    def resume(self, url: str) -> None:
        """Requests that were taken in are all in the scheduler's queue."""
        web.post(f"{url}/resume", timeout=60).raise_for_status()

    def forget(self, url: str) -> None:
        """By vLLM's development mode."""
        web.post(f"{url}/reset_prefix_cache", timeout=60).raise_for_status()

    def update_weights(self, url: str, model: Path) -> None:
        """As trainers do; vLLM forgets nothing by itself."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(model)}}
        web.post(f"{url}/collective_rpc", json=body, timeout=300).raise_for_status()
        self.forget(url)

    def sleep(self, url: str) -> None:
        """By vLLM's development mode."""
        web.post(f"{url}/sleep?level=1", timeout=60).raise_for_status()

    def wake_up(self, url: str) -> None:
        """The same."""
        web.post(f"{url}/wake_up", timeout=60).raise_for_status()

    def metrics(self, url: str) -> str:
        """Current with every step."""
        return web.get(f"{url}/metrics", timeout=10).text

    def kv_events(self, endpoint: str) -> tuple[str, ...]:
        """By vLLM's own publisher."""
        config = {"enable_kv_cache_events": True, "endpoint": endpoint}
        return ("--kv-events-config", json.dumps(config))

    def publish(self, url: str) -> None:
        """It gets them before the answer goes out."""

    def kv_event_batch(self) -> type[Any]:
        """Of vLLM."""
        from vllm.distributed.kv_events import KVEventBatch

        return KVEventBatch


def _body(ask: Ask) -> dict[str, Any]:
    body: dict[str, Any] = {
        "prompt": list(ask.prompt),
        "max_tokens": ask.max_tokens,
        "temperature": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    if ask.logprobs:
        body["logprobs"] = ask.logprobs
    if ask.salt is not None:
        body["cache_salt"] = ask.salt
    if ask.hints:
        body["vllm_xargs"] = ask.hints
    return body


def _cached(usage: Mapping[str, Any]) -> int:
    details = usage.get("prompt_tokens_details") or {}
    return details.get("cached_tokens") or 0


def _read_logprobs(choice: Mapping[str, Any]) -> list[Mapping[int, float]]:
    tops = (choice.get("logprobs") or {}).get("top_logprobs") or []
    return [
        {int(name.removeprefix("token_id:")): value for name, value in top.items()}
        for top in tops
        if top
    ]
