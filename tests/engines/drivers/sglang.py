# SPDX-License-Identifier: Apache-2.0
"""`sglang.launch_server`, over its own API, which speaks in token ids."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from signal import SIGKILL
from typing import Any
from unittest.mock import patch

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
if not ON_GPU:
    # SGLang chooses its platform when a test module first imports it, for good.
    os.environ["SGLANG_PLATFORM"] = "hybrid_cpu"
PAGE_SIZE = 16
CACHE_TOKENS = 8192
STATE_SLOTS = 64
PUBLISH_S = 0.15
"""A scheduler publishes its numbers no more often."""

FLAGS = (
    "--host=127.0.0.1",
    f"--context-length={MAX_MODEL_LEN}",
    "--chunked-prefill-size=96",
    "--enable-metrics",
    "--skip-server-warmup",
    *(
        (
            "--mem-fraction-static=0.2",
            "--cuda-graph-bs-decode",
            "1",
            "4",
            "16",
            # What SGLang picks for itself depends on what else is installed.
            "--attention-backend=triton",
            "--sampling-backend=pytorch",
            "--disable-flashinfer-autotune",
        )
        if ON_GPU
        else ()
    ),
)

_IMPORTS = (
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "tests.engines.drivers.sglang_imports",
)
IMPORTS = () if ON_GPU else _IMPORTS
"""What a server's processes import.  None on a GPU: importing them takes hold of its
driver, which a forked process cannot use."""

PREEMPTION = "overlap, preemption"
SINGLE_TOKENS = "page of 1, no overlap"
ELASTIC = "elastic"
OUR_KERNELS = "our kernels"
IN_TURNS = "our kernels and the engine's in turns"
OUR_KERNELS_ELASTIC = "our kernels, elastic"
STAGES = "elastic, stages of a pipeline"
OTHER_STAGES = "stages that differ, preemption"
IN_STAGES = (STAGES, OTHER_STAGES)

MODELS = {
    "gated delta net, bfloat16": Model(
        "bundled",
        "bfloat16",
        NEAR_TIE,
        quick=(PREEMPTION, ELASTIC, OUR_KERNELS),
        unserved=IN_STAGES,
    ),
    "mamba-2, float32": Model(
        "nemotron_h", "float32", 0.0, quick=(SINGLE_TOKENS, IN_TURNS)
    ),
    "mamba-2 beside attention, float32": Model(
        "falcon_h1", "float32", 0.0, quick=(), unserved=IN_STAGES
    ),
    # SGLang divides none of the others among stages.
    "gated delta net in stages, float32": Model(
        "qwen3_5", "float32", 0.0, quick=IN_STAGES
    ),
}
if ON_GPU:
    # SGLang's norms take no float32 there, and its bfloat16 answers depend on what
    # else is in the batch: `control.py` has up to three of 280 beyond the bound.
    MODELS = {
        "gated delta net, bfloat16": Model("bundled", "bfloat16", NEAR_TIE, stray=5),
        "mamba-2, bfloat16": Model(
            "nemotron_h",
            "bfloat16",
            NEAR_TIE,
            stray=5,
            # SGLang keeps its state layers out of graphs of prefills.
            quick=(
                PREEMPTION,
                SINGLE_TOKENS,
                ELASTIC,
                OUR_KERNELS,
                OUR_KERNELS_ELASTIC,
            ),
        ),
    }

RETRACTING = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "20"}
RETRACTING_NOW = {
    "sglang.srt.managers.scheduler": {"TEST_RETRACT": True, "TEST_RETRACT_INTERVAL": 20}
}
"""The same where the scheduler has been imported."""

VARIANTS = {
    PREEMPTION: Variant(
        {},
        0.05,
        pools=(1280 // PAGE_SIZE, 12),
        # SGLang reserves pages for answers; by itself it preempts hardly ever.
        environment=RETRACTING,
        preempts=True,
    ),
    SINGLE_TOKENS: Variant({"page_size": 1}, 0.4, ("--disable-overlap-schedule",)),
    ELASTIC: Variant(
        {"elastic": True, "gpu_memory_budget": (26 if ON_GPU else 16) << 20}, 0.3
    ),
    OUR_KERNELS: Variant({"kernels": "ours"}, 0.4),
    IN_TURNS: Variant(
        {"kernels": "ours"},
        0.4,
        fault="short_prefills_are_ours",
        says="prefills of up to 40 tokens",
    ),
    OUR_KERNELS_ELASTIC: Variant(
        {
            "kernels": "ours",
            "elastic": True,
            "gpu_memory_budget": (26 if ON_GPU else 16) << 20,
        },
        0.3,
    ),
}
TWO_STAGES = {} if ON_GPU else {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
if not ON_GPU:
    VARIANTS[STAGES] = Variant(
        {"kernels": "ours", "elastic": True, "gpu_memory_budget": 8 << 20},
        0.3,
        # Three batches take turns, of at most four requests.
        (
            "--pp-size=2",
            "--pp-async-batch-depth=1",
            "--pp-max-micro-batch-size=4",
        ),
        TWO_STAGES,
    )
    VARIANTS[OTHER_STAGES] = Variant(
        {},
        0.05,
        ("--pp-size=2",),
        # One attention layer and five with states, then one and one.
        TWO_STAGES | RETRACTING | {"SGLANG_PP_LAYER_PARTITION": "6,2"},
        pools=(1280 // PAGE_SIZE, 12),
        preempts=True,
    )
PREFILL_GRAPHS = "prefill graphs"
GRAPH_FLAGS = (
    "--cuda-graph-backend-prefill=breakable",
    "--cuda-graph-bs-prefill",
    *("16", "32", "64", "96"),
)
if ON_GPU:
    VARIANTS[PREFILL_GRAPHS] = Variant(
        {"kernels": "ours", "prefill_graphs": True}, 0.4, GRAPH_FLAGS
    )

STAGED_ELASTIC = "elastic, three batches in turn"
STAGED_LITTLE = "elastic, little memory"
STAGED_FIXED = "fixed pools, retractions"
STAGED_OURS = "our kernels, messages beside passes"
STAGED = {
    STAGED_ELASTIC: Variant(
        {"elastic": True, "gpu_memory_budget": (14 if ON_GPU else 8) << 20},
        0.3,
        ("--pp-async-batch-depth=1", "--pp-max-micro-batch-size=4"),
    ),
    STAGED_LITTLE: Variant(
        {"elastic": True, "gpu_memory_budget": (8 if ON_GPU else 2) << 20}, 0.02
    ),
    STAGED_FIXED: Variant(
        {},
        0.05,
        pools=(1280 // PAGE_SIZE, 12),
        environment=RETRACTING,
        preempts=True,
    ),
    STAGED_OURS: Variant(
        {"kernels": "ours"}, 0.4, environment={"SGLANG_PP_COMM_OVERLAP": "1"}
    ),
}
STAGES_OF_A_PIPELINE = Stages(
    ("--pp-size=2",),
    {
        "gated delta net": Model(
            "qwen3_5",
            "bfloat16" if ON_GPU else "float32",
            NEAR_TIE if ON_GPU else 0.0,
            stray=5 if ON_GPU else 0,
            quick=(STAGED_ELASTIC, STAGED_FIXED, STAGED_LITTLE),
        ),
        "mamba-2, bfloat16": Model(
            "nemotron_h", "bfloat16", NEAR_TIE, stray=5, quick=(STAGED_OURS,)
        ),
    },
    STAGED,
    elastic_budget=(8 if ON_GPU else 2) << 20,
    environment=TWO_STAGES,
)
"""SGLang gives both stages of a Nemotron-H memory for all layers."""

REFUSALS = {
    "elastic pools of a fixed size": Refusal(
        "elastic pools have no fixed slots; drop --max-mamba-cache-size.",
        {"elastic": True},
        (f"--max-mamba-cache-size={STATE_SLOTS}",),
    ),
    "elastic pools without memory": Refusal(
        "elastic pools do not fit: ",
        {"elastic": True, "gpu_memory_budget": 1 << 20},
    ),
    "plugin excluded from the scheduler": Refusal(
        "--radix-cache-backend='hybrid' is not registered", fault="exclude_workers"
    ),
}


CONFLICTS = {
    "routed experts": (
        ("--enable-return-routed-experts",),
        "SGLang notes what it returns by the place of a token, and restored tokens "
        "have other places; drop --enable-return-routed-experts.",
    ),
    "unknown drafts": (
        ("--speculative-algorithm=UNO",),
        "--speculative-algorithm UNO is not supported yet; use NEXTN, EAGLE, "
        "EAGLE3, STANDALONE, NGRAM, DFLASH or DSPARK.",
    ),
    "a changing number of drafts": (
        ("--speculative-algorithm=NGRAM", "--speculative-adaptive"),
        "the number of drafts must be fixed; drop --speculative-adaptive.",
    ),
    "another cache": (
        ("--enable-hierarchical-cache", "--hicache-storage-backend=file"),
        "--hicache-storage-backend is for SGLang's own cache; drop it, and give the "
        "plugin's option disk or store.",
    ),
    "no chunked prefill": (
        ("--chunked-prefill-size=-1",),
        "it needs chunked prefill; give --chunked-prefill-size a positive size.",
    ),
}

SETTINGS = (
    "chunked_prefill_size",
    "disable_overlap_schedule",
    "disable_radix_cache",
    "enable_hierarchical_cache",
    "mamba_radix_cache_strategy",
    "max_running_requests",
    "page_size",
    "radix_cache_backend",
    "schedule_policy",
)


class SglangDriver:
    """A `Driver`."""

    name = "sglang"
    # On SIGTERM its front end first goes on sleeping for up to five seconds, while
    # its other processes have ended at once.
    last_signal = SIGKILL
    page_size = PAGE_SIZE
    elastic_budget = (22 << 20) if ON_GPU else (7 << 19)
    offloading = ("--enable-hierarchical-cache", "--hicache-ratio=16")
    models = MODELS
    variants = VARIANTS
    stages = STAGES_OF_A_PIPELINE
    refusals = REFUSALS

    conflicts = CONFLICTS

    def decide(self, setup: Setup, *, demanded: bool = False) -> Decision:
        """As far as SGLang's arguments go; its flag is a demand always."""
        flags = [
            f"--model-path={setup.model}",
            "--skip-tokenizer-init",
            f"--dtype={setup.dtype}",
            *_flags(setup),
        ]
        with (
            overheard("sglang.hybrid_plugin") as lines,
            environment(setup.plugin, SGLANG_PLATFORM="" if ON_GPU else "hybrid_cpu"),
        ):
            from sglang.srt.arg_groups import overrides
            from sglang.srt.arg_groups import resolution_hooks as hooks
            from sglang.srt.plugins import load_plugins
            from sglang.srt.server_args import prepare_server_args

            load_plugins()
            # Hooks last as long as their process; a stock server's has none.
            none: dict[str, Any] = {}
            if not setup.plugin:
                none = {step: [] for step in hooks._HOOKS}
            try:
                with patch.dict(hooks._HOOKS, none):
                    arguments = prepare_server_args(flags)
                    arguments.resolve_once()
            except (AssertionError, ValueError, SystemExit) as refusal:
                return Decision(refusal=str(refusal), lines=tuple(lines))
            view = overrides.resolved_view(arguments)
            settings = {name: getattr(view, name) for name in SETTINGS}
        active = settings["radix_cache_backend"] == "hybrid"
        return Decision(active, None, tuple(lines), settings)

    def launch(self, setup: Setup, port: int) -> Launch:
        """The command line of `sglang.launch_server`."""
        command = [
            sys.executable,
            "-m",
            "sglang.launch_server",
            f"--model-path={setup.model}",
            f"--port={port}",
            f"--dtype={setup.dtype}",
            f"--max-running-requests={setup.max_running}",
            *FLAGS,
            *_sizes(setup),
            *_flags(setup),
        ]
        variables = {
            # A probe that generates would take part in what is measured.
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
            "HF_HUB_OFFLINE": "1",
            # Where the plugin is asked for, the platform offers itself.
            "SGLANG_PLATFORM": "" if setup.plugin or ON_GPU else "hybrid_cpu",
        }
        if setup.dtype == "float32":
            variables["SGLANG_MAMBA_CONV_DTYPE"] = "float32"
        variables |= setup.environment
        return Launch(
            command,
            variables | planted(setup.fault),
            () if setup.cold else IMPORTS,
            RETRACTING_NOW if RETRACTING.items() <= setup.environment.items() else {},
        )

    async def stream(self, client: httpx.AsyncClient, ask: Ask) -> Answer:
        """Over /generate, whose every event repeats what came before it."""
        last: dict[str, Any] = {"output_ids": [], "meta_info": {}}
        begin, first = time.monotonic(), 0.0
        body = _body(ask) | {"stream": True}
        async with client.stream("POST", "/generate", json=body) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode()
                return Answer((), error=f"{response.status_code}: {text}")
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    return Answer(tuple(last["output_ids"]), error=str(event["error"]))
                last = event
                tokens = tuple(last["output_ids"])
                if tokens and not first:
                    first = time.monotonic() - begin
                if ask.abort_after is not None and len(tokens) >= ask.abort_after:
                    return Answer(tokens, ttft_s=first, aborted=True)
        return _answer(last, first)

    def cached_with_prompt_logprobs(self, url: str, prompt: Sequence[int]) -> int:
        """Logprobs from the prompt's first token on."""
        body = _body(Ask(tuple(prompt), 4, logprobs=1)) | {"logprob_start_len": 0}
        response = web.post(f"{url}/generate", json=body, timeout=300)
        response.raise_for_status()
        cached: int = response.json()["meta_info"]["cached_tokens"]
        return cached

    def pause(self, url: str) -> None:
        """What the scheduler has stays as it is."""
        body = {"mode": "in_place"}
        web.post(f"{url}/pause_generation", json=body, timeout=60).raise_for_status()

    def resume(self, url: str) -> None:
        """Requests that were taken in go to the scheduler together."""
        web.post(f"{url}/continue_generation", json={}, timeout=60).raise_for_status()

    def forget(self, url: str) -> None:
        """Once nothing runs."""
        web.post(f"{url}/flush_cache?timeout=30", timeout=60).raise_for_status()

    def update_weights(self, url: str, model: Path) -> None:
        """Of itself it forgets what the old ones computed."""
        body = {"model_path": str(model)}
        response = web.post(f"{url}/update_weights_from_disk", json=body, timeout=300)
        response.raise_for_status()

    def sleep(self, url: str) -> None:
        """What it holds beside weights and graphs."""
        body = {"tags": ["kv_cache"]}
        response = web.post(f"{url}/release_memory_occupation", json=body, timeout=60)
        response.raise_for_status()

    def wake_up(self, url: str) -> None:
        """The same."""
        body = {"tags": ["kv_cache"]}
        web.post(
            f"{url}/resume_memory_occupation", json=body, timeout=60
        ).raise_for_status()

    def metrics(self, url: str) -> str:
        """Of a scheduler that was awake since: asleep, it is a second late."""
        for _ in range(2):
            time.sleep(PUBLISH_S)
            _wake(url)
        time.sleep(PUBLISH_S)
        return web.get(f"{url}/metrics", timeout=10, follow_redirects=True).text

    def kv_events(self, endpoint: str) -> tuple[str, ...]:
        """By SGLang's own publisher."""
        config = {"publisher": "zmq", "endpoint": endpoint}
        return ("--kv-events-config", json.dumps(config))

    def publish(self, url: str) -> None:
        """The scheduler gives them to it when it has nothing to compute.

        It has gone through its loop from one order to the next.
        """
        for _ in range(2):
            _wake(url)

    def kv_event_batch(self) -> type[Any]:
        """Of SGLang."""
        from sglang.srt.disaggregation.kv_events import KVEventBatch

        return KVEventBatch


def generate(url: str, prompt: Sequence[int], num_tokens: int, **fields: Any) -> Answer:
    """A greedy answer, to a request with fields that SGLang alone has.

    Args:
        url: of the server.
        prompt: its tokens.
        num_tokens: of the answer, at most.
        fields: such as `lora_path` and `routed_dp_rank`.
    """
    body = _body(Ask(tuple(prompt), num_tokens)) | fields
    response = web.post(f"{url}/generate", json=body, timeout=300)
    assert response.status_code == 200, response.text
    return _answer(response.json(), 0.0)


def _wake(url: str) -> None:
    """Have the scheduler go once through its loop, by an order that changes nothing."""
    body = {"forward_sleep_time": None}
    web.post(f"{url}/slow_down", json=body, timeout=60).raise_for_status()


def _sizes(setup: Setup) -> tuple[str, ...]:
    """Of the pools; SGLang leaves the reserved page and slot out."""
    if setup.options.get("elastic"):
        return ()
    tokens, slots = CACHE_TOKENS, STATE_SLOTS
    if setup.pools is not None:
        tokens = (setup.pools[0] - 1) * setup.options.get("page_size", PAGE_SIZE)
        slots = setup.pools[1] - 1
    return f"--max-total-tokens={tokens}", f"--max-mamba-cache-size={slots}"


def _flags(setup: Setup) -> list[str]:
    """About caching."""
    flags = [
        *(("--enable-hybrid-plugin",) if setup.plugin else ()),
        *(() if setup.prefix_cache else ("--disable-radix-cache",)),
        *setup.flags,
    ]
    if setup.options:
        flags += ["--hybrid-config", json.dumps(dict(setup.options))]
    return flags


def _body(ask: Ask) -> dict[str, Any]:
    body: dict[str, Any] = {
        "input_ids": list(ask.prompt),
        "sampling_params": {"max_new_tokens": ask.max_tokens, "temperature": 0},
    }
    if ask.logprobs:
        body |= {"return_logprob": True, "top_logprobs_num": ask.logprobs}
    if ask.salt is not None:
        body["cache_salt"] = ask.salt
    if ask.hints:
        body["sampling_params"]["custom_params"] = ask.hints
    return body


def _answer(event: Mapping[str, Any], first: float) -> Answer:
    about = event["meta_info"]
    if (about.get("finish_reason") or {}).get("type") == "abort":
        return Answer((), error=str(about["finish_reason"]))
    return Answer(
        tokens=tuple(event["output_ids"]),
        prompt_tokens=about.get("prompt_tokens", 0),
        cached_tokens=about.get("cached_tokens", 0),
        cached_from=about.get("cached_tokens_details") or {},
        ttft_s=first,
        logprobs=tuple(
            {token: logprob for logprob, token, _ in top}
            for top in about.get("output_top_logprobs") or ()
        ),
    )
