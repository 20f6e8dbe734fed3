# SPDX-License-Identifier: Apache-2.0
"""Serves requests that stream their input, by vLLM and the plugin; prints the answers.

    python -m tests.engines.session_phases_vllm FOLDER

Stock vLLM without a cache answers each turn as a prompt of its own: all that the
session has of its prompts and answers so far.  Of an answer that is the tokens that
were computed; vLLM drops the last one, which was only sampled.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
from collections.abc import AsyncGenerator
from contextlib import closing
from pathlib import Path
from typing import Any

from hybrid_plugin.tools.prometheus_text import Metrics
from tests.engines import slow_decay
from tests.engines.model_phases_vllm import refusing_pages, set_environment
from tests.engines.phases import report

PAGE = 32
STEP = 96
"""Tokens of a step, which the longest turns do not fit in."""
ANSWER = 12
SESSIONS = ((150, 40, 20), (64, 1, 130, 33), (33, 20, 20, 20))
"""Lengths of what each session says, in turns: within pages and at their ends."""
NEXT = [7, 8, 9]
"""Behind all that a session had, in an ordinary request."""
CROWD = 4
"""Chats beside the sessions."""
REFUSED_EVERY = 23
"""One in so many growths of a sequence finds no page, upon which vLLM preempts."""
LIMIT_S = 300.0
"""A session whose engine has ended would wait for ever."""
Tokens = list[list[int]]
Found = dict[str, Any]


def some(rng: random.Random, count: int) -> list[int]:
    """Tokens at random."""
    return [rng.randrange(3, 250) for _ in range(count)]


def chunks() -> list[Tokens]:
    """What each session says in each turn."""
    rng = random.Random(5)
    return [[some(rng, length) for length in lengths] for lengths in SESSIONS]


def crowd() -> Tokens:
    """Prompts of ordinary requests."""
    rng = random.Random(6)
    return [some(rng, 100 + 30 * number) for number in range(CROWD)]


class Engine:
    """vLLM's asynchronous engine, which alone takes input in turns."""

    def __init__(self, model: Path, options: dict[str, Any] | None) -> None:
        """Start it; without options, by stock code and without a cache."""
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = AsyncEngineArgs(
            model=str(model),
            dtype="float32",
            enforce_eager=True,
            async_scheduling=False,
            skip_tokenizer_init=True,
            max_model_len=1024,
            max_num_seqs=8,
            max_num_batched_tokens=STEP,
            kv_cache_memory_bytes=64 << 20,
            enable_prefix_caching=options is not None,
            additional_config={"hybrid_plugin": options or {"enabled": False}},
        )
        self._llm = AsyncLLM.from_engine_args(arguments)
        self._names = map(str, itertools.count())

    async def ask(self, prompt: list[int], length: int = ANSWER) -> tuple[Any, int]:
        """The answer to an ordinary request, and the tokens restored for it."""
        tokens, cached = [], 0
        async for output in self._outputs({"prompt_token_ids": prompt}, length):
            tokens += list(output.outputs[0].token_ids)
            cached = max(cached, output.num_cached_tokens or 0)
        return tokens, cached

    async def converse(self, said: Tokens, *, waits: bool) -> Tokens:
        """The answers of a session.

        Args:
            said: in each turn.
            waits: whether each turn is said once the one before is answered.
        """
        from vllm.engine.protocol import StreamingInput

        tokens: list[int] = []
        came = asyncio.Condition()

        async def speak() -> AsyncGenerator[Any, None]:
            for turn, chunk in enumerate(said):
                if waits:
                    async with came:
                        await came.wait_for(lambda t=turn: len(tokens) >= t * ANSWER)
                yield StreamingInput({"prompt_token_ids": chunk})

        async for output in self._outputs(speak(), ANSWER):
            async with came:
                tokens += list(output.outputs[0].token_ids)
                came.notify_all()
        return [
            tokens[start : start + ANSWER] for start in range(0, len(tokens), ANSWER)
        ]

    def close(self) -> None:
        """End its processes."""
        self._llm.shutdown()

    def _outputs(self, prompt: Any, length: int) -> AsyncGenerator[Any, None]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            temperature=0,
            max_tokens=length,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        return self._llm.generate(prompt, sampling, next(self._names))


def whole(said: Tokens, answers: Tokens) -> list[int]:
    """All that a session has computed after some turns, and what it says then."""
    found = list(said[0])
    for answer, chunk in zip(answers, said[1:], strict=False):
        found += answer[:-1] + chunk
    return found


async def stock(model: Path) -> Found:
    """Each turn of each session as a prompt, and the crowd."""

    async def turns(said: Tokens) -> Tokens:
        answers: Tokens = []
        for turn in range(len(said)):
            answer, _ = await engine.ask(whole(said[: turn + 1], answers))
            answers.append(answer)
        return answers

    with closing(Engine(model, None)) as engine:
        sessions = await asyncio.gather(*map(turns, chunks()))
        answers = await asyncio.gather(*map(engine.ask, crowd()))
    return {"sessions": sessions, "crowd": [answer for answer, _ in answers]}


async def plugin(model: Path) -> Found:
    """The sessions beside a crowd, at a user's pace and at once, and who goes on."""
    found: Found = {"after": []}
    before = preemptions()
    with closing(Engine(model, {"page_size": PAGE})) as engine:
        for name, waits in (("in turns", True), ("at once", False)):
            sessions = [engine.converse(said, waits=waits) for said in chunks()]
            answers = await asyncio.gather(*sessions, *map(engine.ask, crowd()))
            found[name] = answers[: len(sessions)]
            found[f"crowd, {name}"] = [answer for answer, _ in answers[len(sessions) :]]
        for said, answers in zip(chunks(), found["in turns"], strict=True):
            prompt = whole([*said, NEXT], answers)
            _, cached = await engine.ask(prompt)
            found["after"].append((len(prompt) - len(NEXT), cached))
    found["preemptions"] = preemptions() - before
    return found


def preemptions() -> float:
    """Of all engines that this process had, by the plugin's metrics."""
    from prometheus_client import generate_latest

    metrics = Metrics(generate_latest().decode())
    return metrics.total("hybrid_cache_preemptions_total") or 0.0


async def main(folder: Path) -> None:
    """Print one line of JSON."""
    model = slow_decay.write_nemotron_h(folder)
    async with asyncio.timeout(LIMIT_S):
        found = {"stock": await stock(model), "plugin": await plugin(model)}
        with refusing_pages(REFUSED_EVERY):
            found["preempting"] = await plugin(model)
    report(found)


if __name__ == "__main__":
    set_environment()
    asyncio.run(main(Path(sys.argv[1])))
