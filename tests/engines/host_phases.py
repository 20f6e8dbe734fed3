# SPDX-License-Identifier: Apache-2.0
"""Serves chats that the device forgets and the host keeps; prints what came out.

    python -m tests.engines.host_phases FOLDER NAME ...

writes models into the folder and serves them in one engine after the other, all in this
process, so that vLLM is imported once and the cache can be looked at: each by stock
vLLM without a cache, and then as the names among `SERVED` say.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.engines import slow_decay
from tests.engines.phases import report

MAX_MODEL_LEN = 1024
STEP = 128
"""Tokens of a step: a prompt takes several."""
PAGE = 32
ON_GPU = torch.cuda.is_available()
CHATS, PROMPT, ANSWER = 50 if ON_GPU else 10, 330, 12
CROWD, CROWD_ANSWER = 8, 250
BUDGET = (24 if ON_GPU else 4) << 20
"""Bytes for fewer than the chats; a GPU's granules are larger."""
SLOW = 64 << 10
"""Bytes in a second, for restores that last: a state alone takes four seconds."""
SLOWER = 1.0
"""Seconds of a token's prefill, for restores that repay all the same."""
RANDOM = random.Random(3)

DROPPED = slice(5, 7)
"""Chats of which nothing is left on the device when their turns are dropped."""

Found = dict[str, Any]
Tokens = list[list[int]]


def tokens(count: int) -> list[int]:
    """A prompt of its own."""
    return [RANDOM.randrange(3, 250) for _ in range(count)]


FIRST = [tokens(PROMPT + 7 * chat % 70) for chat in range(CHATS)]
MORE = [tokens(25) for _ in range(CHATS)]
CROWDED = [tokens(100) for _ in range(CROWD)]


@contextmanager
def zeroed_states() -> Iterator[None]:
    """Restores that lose the states: they are zeroed where their stream awaits them."""
    from hybrid_plugin.core.commands import Await, Load, Pool, Zero
    from hybrid_plugin.device.executor import Executor

    run = Executor.run
    loaded: dict[int, list[int]] = {}

    def losing(executor: Executor, commands: Any) -> None:
        changed: list[Any] = []
        for command in commands:
            changed.append(command)
            if isinstance(command, Load) and command.pool == Pool.STATE:
                loaded.setdefault(command.ticket, []).extend(command.destinations)
            elif isinstance(command, Await):
                slots = loaded.pop(command.ticket, [])
                changed += [Zero(Pool.STATE, slot) for slot in slots]
        run(executor, changed)

    Executor.run = losing  # type: ignore[method-assign]
    try:
        yield
    finally:
        Executor.run = run  # type: ignore[method-assign]


HOST: Mapping[str, Any] = {"host_memory": "64MiB", "gpu_memory_budget": BUDGET}
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}


@dataclass(frozen=True)
class Setup:
    """An engine, and what is asked of it."""

    options: Mapping[str, Any]
    """Of the plugin."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Of vLLM."""
    broken: Callable[[], AbstractContextManager[None]] = nullcontext
    """What is broken meanwhile."""
    kind: str = "nemotron_h"
    """Of the model."""
    only_chats: bool = True


SERVED: Mapping[str, Setup] = {
    "elastic": Setup({"elastic": True, **HOST}, only_chats=False),
    "fixed": Setup({"elastic": False, **HOST}, only_chats=False),
    "zeroed": Setup({"elastic": True, **HOST}, broken=zeroed_states),
    "without": Setup({"elastic": True, "gpu_memory_budget": BUDGET}),
    "our kernels": Setup({"elastic": True, "kernels": "ours", **HOST}),
    "drafts": Setup({"elastic": True, **HOST}, {"speculative_config": NGRAM}),
    "two ranks": Setup(
        {"elastic": True, **HOST, "gpu_memory_budget": BUDGET // 2},
        {"tensor_parallel_size": 2},
    ),
    "windows": Setup(
        {"enabled": True, **HOST, "gpu_memory_budget": BUDGET * 3 // 4}, kind="gemma3"
    ),
}


class Served:
    """One engine in this process."""

    def __init__(
        self, model: Path, options: Mapping[str, Any], **arguments: Any
    ) -> None:
        from vllm import LLM

        active = options.get("enabled", True)
        self.llm = LLM(
            model=str(model),
            dtype="float32",
            enforce_eager=True,
            skip_tokenizer_init=True,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=8,
            max_num_batched_tokens=STEP,
            kv_cache_memory_bytes=64 << 20,
            disable_log_stats=True,
            enable_prefix_caching=active,
            **({"gpu_memory_utilization": 0.05} if ON_GPU else {}),
            # The plugin is told by its own option.
            block_size=None if active else PAGE,
            additional_config={
                "hybrid_plugin": dict(options) | ({"page_size": PAGE} if active else {})
            },
            **arguments,
        )
        self._names = 0

    @property
    def manager(self) -> Any:
        """The KV cache manager."""
        return self.llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager

    def ask(self, prompts: Tokens, length: int = ANSWER) -> Found:
        """Answers, and the tokens that were restored for each."""
        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            self._sampling(length),
            use_tqdm=False,
        )
        return {
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "cached": [output.num_cached_tokens or 0 for output in outputs],
            "prompts": [len(prompt) for prompt in prompts],
        }

    def keep_busy(self) -> str:
        """Begin a request that runs until it is aborted; returns its name."""
        name = self._begin(tokens(40), 400)
        self._step(3)
        return name

    def drop_while_it_waits(self, prompt: list[int]) -> Found:
        """Send a request, and abort it while its restore runs."""
        name = self._begin(prompt, ANSWER)
        self._step(3)
        waits = not self.manager.cache.is_live(self._internal(name))
        found = {"waits": waits, "restoring": self.is_restoring()}
        self.end(name)
        return found

    def end(self, name: str) -> None:
        """Abort a request, and take the step that notes it."""
        self.llm.llm_engine.abort_request([name])
        self._step(1)

    def _begin(self, prompt: list[int], length: int) -> str:
        self._names += 1
        name = f"alone-{self._names}"
        self.llm.llm_engine.add_request(
            name, {"prompt_token_ids": prompt}, self._sampling(length)
        )
        return name

    def _step(self, count: int) -> None:
        for _ in range(count):
            self.llm.llm_engine.step()

    def _internal(self, name: str) -> str:
        """vLLM adds to names of requests."""
        requests = self.llm.llm_engine.engine_core.engine_core.scheduler.requests
        return next(one for one in requests if one.startswith(name))

    def is_restoring(self) -> bool:
        """Whether a restore is on its way."""
        return self.manager.cache.lower_tiers.restores_due is not None

    def counts(self) -> dict[str, int]:
        """All totals of the cache, with those of the tiers behind it."""
        cache = self.manager.cache
        totals = dict(cache.stats.as_dict())
        if cache.host is not None:
            totals |= cache.host.stats.as_dict()
        for tier in cache.lower_tiers.outer:
            totals |= tier.stats.as_dict(tier.name)
        return totals

    def finish(self) -> None:
        """Make steps for as long as they are of use, as a server does."""
        core = self.llm.llm_engine.engine_core.engine_core
        while core.scheduler.has_requests():
            self._step(1)
            time.sleep(0.001)

    def order(self, **order: Any) -> dict[str, Any]:
        """Have an order about sessions taken, and wait until it is over."""
        self.finish()  # files are open then
        answer: dict[str, Any] = self.manager.take_session_order(order)
        while "ticket" in answer:
            self._step(1)
            time.sleep(0.001)
            poll = {"action": "poll", "ticket": answer["ticket"]}
            answer = self.manager.take_session_order(poll)
        return answer

    def levels(self) -> dict[str, list[int]]:
        """Ids of each pool: used, cached and free."""
        levels = self.manager.cache.levels()
        return {name: [one.used, one.cached, one.free] for name, one in levels.items()}

    def _sampling(self, length: int) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            temperature=0, max_tokens=length, ignore_eos=True, detokenize=False
        )

    def close(self) -> None:
        """End it, for the next one."""
        from vllm.distributed import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()
        cleanup_dist_env_and_memory()


def chats(engine: Served, said: Tokens | None = None) -> Found:
    """Two turns of each chat; before the second one the device has forgotten the first.

    Args:
        engine: that serves them.
        said: answers that second turns contain; by default the engine's own.
    """
    first = engine.ask(FIRST)
    found = {"first": first}
    found["second"] = engine.ask(second_turns(said or first["tokens"]))
    return found


def second_turns(said: Tokens) -> Tokens:
    """What users send after these answers."""
    turns = zip(FIRST, said, MORE, strict=True)
    return [prompt + answer + more for prompt, answer, more in turns]


def serve(model: Path, setup: Setup, answers: Found) -> Found:
    """Serve all phases, or the chats, in an engine of the plugin."""
    said = answers["first"]["tokens"]
    with setup.broken():
        engine = Served(model, setup.options, **setup.arguments)
        found = chats(engine, said)
        if not setup.only_chats:
            found["crowd"] = engine.ask(CROWDED, CROWD_ANSWER)
        found["stats"] = engine.counts()
        found["levels"] = engine.levels()
        if not setup.only_chats:
            found["third"] = engine.ask(FIRST[:3])
            found |= dropped(engine, second_turns(said)[DROPPED])
        engine.close()
    return found


def dropped(engine: Served, prompts: Tokens) -> Found:
    """Requests that go, and a flush, while restores that last are under way.

    Args:
        engine: that serves them.
        prompts: that begin with what only the host has.
    """
    engine.manager.new_measurements = lambda report: None
    rates = engine.manager.cache.rates
    rates.load_bytes_per_second, rates.prefill_seconds_per_token = SLOW, SLOWER
    found: Found = {"dropped": []}
    for prompt in prompts:
        busy = engine.keep_busy()
        found["dropped"].append(engine.drop_while_it_waits(prompt))
        found["still restoring"] = engine.is_restoring()
        found["flushed early"] = engine.llm.reset_prefix_cache()
        engine.end(busy)
        found["dropped levels"] = engine.levels()
    found["flushed"] = engine.llm.reset_prefix_cache()
    found["flushed levels"] = engine.levels()
    found["last"] = engine.ask(prompts)
    return found


def stock(model: Path) -> Found:
    """What vLLM alone answers, without a cache."""
    engine = Served(model, {"enabled": False})
    found = chats(engine)
    found["crowd"] = engine.ask(CROWDED, CROWD_ANSWER)
    engine.close()
    return found


def main(folder: Path, names: list[str]) -> None:
    """Print one line of JSON."""
    found: dict[str, Found] = {}
    for kind in dict.fromkeys(SERVED[name].kind for name in names):
        model = getattr(slow_decay, f"write_{kind}")(folder / kind)
        found[kind] = stock(model)
        for name in names:
            if SERVED[name].kind == kind:
                found[name] = serve(model, SERVED[name], found[kind])
    report(found)


if __name__ == "__main__":
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["TRITON_F32_DEFAULT"] = "ieee"
    main(Path(sys.argv[1]), sys.argv[2:])
