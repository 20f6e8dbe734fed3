# SPDX-License-Identifier: Apache-2.0
"""Serves a Qwen4-Exp by vLLM with the plugin, and alone; prints what came of it.

    python -m tests.engines.ring_phases_vllm FOLDER

writes the model into the folder.  The plugin serves chats, and prompts so long that a
query cannot read all of them, and then vLLM without a cache answers the same ones: all
of a phase at once, and one by one.

Answers show little of index keys, of which most are read anyway.  So the index keys of
prompts are read out of the pages, too: behind hits, without a cache, and behind hits of
which one part at a time was zeroed on purpose.  At last it says what is wrong, and ends
with 1 if something is.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.engines.chat_verdicts import described, judged, reported, say
from tests.engines.chats_vllm import (
    ANSWER,
    Asked,
    Engine,
    Found,
    Reference,
    Setup,
    Tokens,
    chats,
    prompts,
    set_environment,
    turns,
    zeroed_pages,
)
from tests.engines.model_workload import zeroed_snapshots
from tests.engines.pass_cost import as_on_cpu
from tests.engines.slow_decay import sharpen_attention, write_qwen4_exp_text

NAME = "qwen4_exp"
TOKENS = 4
"""Of an index key."""
LONG = (2603, 2890)
"""Prompts of more tokens than a query reads."""
BASES = (300, 97, 50, 501, 203, 410, 119, 275, 2602)
"""Prompts on which others go on, most of which end between the tokens of a key."""
MORE = 21
ALIKE = 0.985
"""Cosine of two index keys that stand for the same tokens."""
ARGUMENTS: dict[str, Any] = {
    "max_model_len": 4096,
    "kv_cache_memory_bytes": 256 << 20,
    "mamba_ssm_cache_dtype": "float32",
    "engram_config": {"cpu_offload": False},
}
SETUP = Setup(NAME, {}, ARGUMENTS, graphs=True, tells_pages=False)


class Watched(Engine):
    """The plugin's engine, which tells the index keys of each request at its end."""

    def __init__(self, model: Path) -> None:
        """Start it."""
        super().__init__(model, {"enabled": True}, ARGUMENTS, graphs=SETUP.graphs)
        self._kept: dict[tuple[int, ...], torch.Tensor] = {}
        manager, free = self.manager, self.manager.free

        def watch(request: Any) -> None:
            if request.is_finished() and manager.cache.is_live(request.request_id):
                prompt = tuple(request.prompt_token_ids)
                self._kept[prompt] = self._keys(request, len(prompt) // TOKENS)
            free(request)

        manager.free = watch

    def keys(self, asked: Tokens) -> list[torch.Tensor]:
        """Those of prompts that were answered, `[layers, keys, D]` each."""
        return [self._kept[tuple(prompt)] for prompt in asked]

    @property
    def worker(self) -> Any:
        """Of the one rank."""
        core = self._llm.llm_engine.engine_core.engine_core
        return core.model_executor.driver_worker.worker

    def caches(self, end: str) -> dict[str, Any]:
        """vLLM's layers whose names end so."""
        layers = self.worker.vllm_config.compilation_config.static_forward_context
        return {name: one for name, one in layers.items() if name.endswith(end)}

    def _keys(self, request: Any, count: int) -> torch.Tensor:
        caches = self.caches(".compressed_key_cache")
        pages = self.manager.get_block_ids(request.request_id)[self._key_group]
        torch.cuda.synchronize()
        found = [one.kv_cache[pages].flatten(0, 2)[:count] for one in caches.values()]
        return torch.stack(found).float().cpu()

    @property
    def _key_group(self) -> int:
        (name, *_) = self.caches(".compressed_key_cache")
        groups = self.worker.model_runner.kv_cache_config.kv_cache_groups
        return next(n for n, one in enumerate(groups) if name in one.layer_names)

    def lay_out(self) -> Iterator[str]:
        """How everything lies, for whoever has to find a mistake."""
        runner = self.worker.model_runner
        layers = self.caches("")
        for number, group in enumerate(runner.kv_cache_config.kv_cache_groups):
            spec = group.kv_cache_spec
            yield (
                f"group {number}: {len(group.layer_names)} layers, blocks of "
                f"{spec.block_size} tokens and {spec.page_size_bytes} bytes, {spec}"
            )
            for name in group.layer_names:
                views = layers[name].kv_cache
                views = views if isinstance(views, tuple | list) else (views,)
                for view in views:
                    yield (
                        f"  {name}: {tuple(view.shape)} by {view.stride()} at "
                        f"{view.storage_offset()}, {view.dtype}"
                    )
        tables = runner.block_tables.input_block_tables
        yield f"tables: {[tuple(table.shape) for table in tables]}"
        levels = self.manager.cache.levels()
        yield f"pools: { ({str(pool): level for pool, level in levels.items()}) }"


@contextmanager
def zeroed_rings(engine: Watched) -> Iterator[None]:
    """A cache whose hits find zeros where tokens wait for their key."""
    from hybrid_plugin.core.commands import Copy, Pool
    from hybrid_plugin.device.executor import Executor

    run = Executor.run

    def forgetful(executor: Executor, commands: Sequence[Any]) -> None:
        run(executor, commands)
        for command in commands:
            if isinstance(command, Copy) and command.pool == Pool.STATE:
                for ring in engine.caches(".raw_key_cache").values():
                    ring.kv_cache[command.destination] = 0

    Executor.run = forgetful  # type: ignore[method-assign]
    try:
        yield
    finally:
        Executor.run = run  # type: ignore[method-assign]


def ask_long(engine: Engine, done: dict[str, Asked]) -> None:
    """Two turns of chats that are longer than what a query reads."""
    first = prompts(20, LONG)
    done["long"] = Asked(first, engine.ask(first), ANSWER)
    second = turns(done["long"], 21)
    done["long again"] = Asked(second, engine.ask(second), ANSWER)


def unlike(keys: torch.Tensor, others: torch.Tensor) -> list[int]:
    """Numbers of the keys that are others in some layer, beyond rounding."""
    alike = torch.cosine_similarity(keys, others, -1).amin(0)
    return [int(number) for number in (alike < ALIKE).nonzero()]


def compare_keys(engine: Watched) -> Found:
    """Which index keys of prompts are not those without a cache, by what was zeroed."""
    bases, more = prompts(30, BASES), prompts(31, [MORE] * len(BASES))
    longer = [base + end for base, end in zip(bases, more, strict=True)]
    engine.forget()
    for prompt in longer:
        engine.ask([prompt], 1)
    alone = engine.keys(longer)
    damages: dict[str, Callable[[], AbstractContextManager[None]]] = {
        "zeroed rings": lambda: zeroed_rings(engine),
        "zeroed pages": zeroed_pages,
        "zeroed states": zeroed_snapshots,
    }
    found: Found = {"hits": {}, "wrong": {}}

    def ask(phase: str) -> None:
        answers = engine.ask(longer, 1)
        found["hits"][phase] = [answer.cached_tokens for answer in answers]
        pairs = zip(engine.keys(longer), alone, strict=True)
        found["wrong"][phase] = [unlike(one, other) for one, other in pairs]

    engine.forget()
    engine.ask(bases, 1)
    ask("behind hits")
    for phase, damage in damages.items():
        engine.forget()
        engine.ask(bases, 1)
        with damage():
            ask(phase)
    return found


def wrong_keys(found: Found, page_size: int) -> Iterator[str]:
    """What is wrong with index keys, a phrase each.

    Args:
        found: by `compare_keys`.
        page_size: tokens of a page.
    """
    for phase, hits in found["hits"].items():
        if hits != list(BASES):
            yield f"{phase}: {hits} tokens were restored, of {BASES}"
    for hit, wrong in zip(BASES, found["wrong"]["behind hits"], strict=True):
        if wrong:
            yield f"behind a hit of {hit} tokens index keys {wrong} are wrong"
    for hit, wrong in zip(BASES, found["wrong"]["zeroed rings"], strict=True):
        if (hit // TOKENS in wrong) != (hit % TOKENS > 0):
            yield f"with a zeroed ring at {hit} tokens keys {wrong} are wrong"
    for hit, wrong in zip(BASES, found["wrong"]["zeroed pages"], strict=True):
        lost = {*range(hit // page_size * page_size // TOKENS, hit // TOKENS)}
        if not lost <= {*wrong}:
            yield f"with a zeroed page at {hit} tokens keys {wrong} are wrong"
    for hit, wrong in zip(BASES, found["wrong"]["zeroed states"], strict=True):
        if not any(number >= hit // TOKENS for number in wrong):
            yield f"with zeroed states at {hit} tokens keys {wrong} are wrong"


def serve(model: Path, asked: dict[str, Asked]) -> Found:
    """What the plugin's engine says; its answers go to `asked`."""
    engine = Watched(model)
    try:
        for line in engine.lay_out():
            say(line)
        chats(engine, asked)
        ask_long(engine, asked)
        keys = compare_keys(engine)
        say(f"index keys: {keys}")
        return engine.described() | {"keys": keys}
    finally:
        engine.close()


def compare_with_stock(model: Path, asked: dict[str, Asked]) -> dict[str, Found]:
    """How far each phase is from vLLM without a cache, and that from itself."""
    reference = Reference(model, ARGUMENTS)
    try:
        found = {}
        for phase, one in asked.items():
            stock = reference.answers(one)
            own = [reference.engine.ask([each], one.length)[0] for each in one.prompts]
            found[phase] = judged(one, stock, own)
            say(f"{phase}: {described(found[phase])}")
        return found
    finally:
        reference.close()


def do_without_cutlass() -> None:
    """Have vLLM multiply by PyTorch where its own kernel for it cannot be compiled."""
    if all(importlib.util.find_spec(name) for name in ("cutlass", "quack")):
        return
    from vllm.models.qwen4_exp.nvidia import hyperconnection, model

    say("CUTLASS or quack is not installed: residual streams are mixed by PyTorch.")
    hyperconnection.MAX_FUSED_M = 0
    model.request_hc_down_silu_warmup = lambda *_: None


def main(folder: Path) -> int:
    """Print a line for each phase, and at last one line of JSON."""
    model = sharpen_attention(write_qwen4_exp_text(folder / NAME))
    do_without_cutlass()
    found: Found = {}
    asked: dict[str, Asked] = {}
    try:
        found = serve(model, asked)
        found["phases"] = compare_with_stock(model, asked)
    except Exception:
        found = {"error": traceback.format_exc()}
    code = reported({NAME: SETUP}, {NAME: found}, ranks=1, more=all_wrong)
    return code


def all_wrong(found: Found) -> Iterator[str]:
    """What is wrong besides what `chat_verdicts` tells."""
    if "error" in found:
        return
    yield from wrong_keys(found["keys"], found["page_size"])
    whole = [length + ANSWER - 1 for length in LONG]
    if found["phases"]["long again"]["cached"] != whole:
        yield f"long again: {found['phases']['long again']['cached']}, not {whole}"


if __name__ == "__main__":
    set_environment()
    as_on_cpu()
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    sys.exit(main(Path(sys.argv[1])))
