# SPDX-License-Identifier: Apache-2.0
"""An engine in this process, whose passes are written down."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import sglang_prefix, vllm_prefix
from benchmarks.passes.log import VARIABLE
from benchmarks.prefix_sides import check_plugin
from benchmarks.prefix_workloads import Ask


@dataclass(frozen=True)
class Running:
    """An engine that answers."""

    engine: Any
    """vLLM's `AsyncLLM`, or SGLang's `Engine`."""
    ask: Ask
    facts: Mapping[str, Any]
    """What it says about itself."""
    passes: Path
    """The file that `log.read` reads."""


Work = Callable[[Running], Coroutine[Any, Any, None]]


def run(engine: str, arguments: Mapping[str, Any], work: Work) -> None:
    """Start an engine, do the work with it, and end it.

    Args:
        engine: "vllm" or "sglang".
        arguments: of the engine, in its own words.
        work: what to do while it runs.
    """
    check_plugin(engine)
    with tempfile.TemporaryDirectory(prefix="hybrid-passes-") as folder:
        passes = Path(folder, "passes")
        os.environ[VARIABLE] = str(passes)
        if engine == "vllm":
            asyncio.run(_vllm(dict(arguments), work, passes))
        else:
            _sglang(dict(arguments), work, passes)


async def _vllm(arguments: dict[str, Any], work: Work, passes: Path) -> None:
    from vllm import __version__
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from benchmarks.passes import vllm_worker

    given = AsyncEngineArgs(**arguments, worker_extension_cls=vllm_worker.CLASS)
    engine = AsyncLLM.from_engine_args(given)
    try:
        await engine.collective_rpc("count_passes")
        block_size = engine.vllm_config.cache_config.block_size
        facts = {"vllm": __version__, "block_size": block_size}
        await work(Running(engine, vllm_prefix.asker(engine), facts, passes))
    finally:
        engine.shutdown()


def _sglang(arguments: dict[str, Any], work: Work, passes: Path) -> None:
    import sglang
    from sglang.srt.entrypoints.engine import Engine as Stock

    from benchmarks.passes.sglang_scheduler import run_scheduler

    class Engine(Stock):  # type: ignore[misc]
        run_scheduler_process_func = staticmethod(run_scheduler)

    engine = Engine(**arguments)
    facts: dict[str, Any] = {"sglang": sglang.__version__}
    pools = ("max_mamba_cache_size", "max_total_tokens")
    facts |= {name: arguments[name] for name in pools if name in arguments}
    running = Running(engine, sglang_prefix.asker(engine), facts, passes)
    try:
        engine.loop.run_until_complete(work(running))
    finally:
        engine.shutdown()
