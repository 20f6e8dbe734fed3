# SPDX-License-Identifier: Apache-2.0
"""`sglang.launch_server` for the demo."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from hybrid_plugin.tools.demo.engines import Launch, Levels, has_gpu, whole
from hybrid_plugin.tools.prometheus_text import Metrics

PAGE_SIZE = 16


@dataclass(frozen=True)
class SglangEngine:
    """SGLang, on its CPU platform where there is no GPU."""

    cache_tokens: int = 8192
    """Tokens of KV, in pages of `PAGE_SIZE`."""
    state_slots: int = 20
    """States, running ones and cached ones together."""
    max_model_len: int = 2048
    max_running: int = 64
    stock_flags: Sequence[str] = (
        "--mamba-radix-cache-strategy=extra_buffer_lazy",
        "--mamba-track-interval=64",
    )
    """What helps stock SGLang on these workloads: states kept inside prompts, with
    slots for them taken as late as possible, and while decoding at every 64 tokens,
    its least, instead of every 256."""

    name: str = "sglang"
    request_extra: Mapping[str, Any] = field(
        default_factory=lambda: {"skip_special_tokens": False, "no_stop_trim": True}
    )
    """The token that ends an answer comes as text: SGLang leaves logprobs out of the
    stream that come without text, and whether that one comes alone is chance."""
    reset_path: str = "/flush_cache?timeout=120"
    page_note: str = f"a page holds {PAGE_SIZE} tokens in both"

    def version(self) -> str:
        """The version installed."""
        try:
            return metadata.version("sglang")
        except metadata.PackageNotFoundError as error:
            raise RuntimeError(
                f"SGLang is not installed beside {sys.executable}; run `make "
                "demo-sglang`, which installs it, or run the demo with the Python of "
                "an environment that has it."
            ) from error

    def settings(self) -> dict[str, Any]:
        """What both servers were started with."""
        return {
            "cache_tokens": self.cache_tokens,
            "state_slots": self.state_slots,
            "page_size": PAGE_SIZE,
            "max_model_len": self.max_model_len,
            "max_running": self.max_running,
            "stock_flags": list(self.stock_flags),
        }

    def launch(self, model: Path, port: int, *, plugin: bool) -> Launch:
        """Equal pools for both; the plugin, or flags of stock SGLang's own cache."""
        command = [
            sys.executable,
            "-m",
            "sglang.launch_server",
            f"--model-path={model}",
            "--served-model-name=tiny",
            f"--port={port}",
            "--host=127.0.0.1",
            "--dtype=bfloat16",
            f"--context-length={self.max_model_len}",
            f"--max-running-requests={self.max_running}",
            f"--max-total-tokens={self.cache_tokens}",
            f"--max-mamba-cache-size={self.state_slots}",
            f"--page-size={PAGE_SIZE}",
            "--chunked-prefill-size=2048",
            "--enable-metrics",
            "--enable-cache-report",
            "--log-level-http=warning",
            *(("--enable-hybrid-plugin",) if plugin else self.stock_flags),
        ]
        environment = {"HYBRID_PLUGIN": "1" if plugin else "0", "HF_HUB_OFFLINE": "1"}
        if not has_gpu():
            environment["SGLANG_PLATFORM"] = "hybrid_cpu"
        return Launch(command, environment)

    def levels(self, metrics: Metrics, *, plugin: bool) -> Levels:
        """Ours are counted; stock SGLang counts tokens and states in use."""
        if plugin:
            pages = metrics.total("hybrid_cache_pages", kind="used")
            slots = metrics.total("hybrid_cache_slots", kind="used")
        else:
            tokens = metrics.total("sglang:kv_used_tokens")
            pages = None if tokens is None else tokens / PAGE_SIZE
            slots = metrics.total("sglang:mamba_used_tokens")
        running = metrics.total("sglang:num_running_reqs")
        retracted = metrics.total("sglang:num_retracted_requests_total")
        if retracted is None and running is not None:
            retracted = 0.0  # the counter appears with the first
        return Levels(
            pages=whole(pages),
            slots=whole(slots),
            running=whole(running),
            preemptions=whole(retracted),
        )
