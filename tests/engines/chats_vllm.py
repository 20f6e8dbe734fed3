# SPDX-License-Identifier: Apache-2.0
"""Chats that vLLM answers in this process, with what was likeliest at each token.

Turns, prompts that begin alike, a crowd that is preempted, and snapshots and pages that
are zeroed on purpose: for what is compared with vLLM itself on GPUs, where rounding
differs from batch to batch.  `chat_verdicts` says what is wrong with the answers.
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.engines.messages import Answer
from tests.engines.model_phases_vllm import refusing_pages
from tests.engines.model_workload import zeroed_copies, zeroed_snapshots

ON_GPU = torch.cuda.is_available()
PAGE = 32
"""Tokens of a page, those of its rows on all ranks, where the attention takes that."""
MAX_MODEL_LEN = 1024
STEP = 128
"""Tokens of a step: a prompt takes several."""
CHATS, ANSWER, MORE = 8, 24, 20
SHARED, CROWD, CROWD_ANSWER = 250, 6, 40
REFUSED_EVERY = 23
FORGOTTEN = 120 if ON_GPU else 10
"""Chats of which the device keeps a part."""
TOP = 10
"""Likeliest tokens that come with each token of an answer."""
WRONG = ("zeroed states", "zeroed pages")

Tokens = list[list[int]]
Found = dict[str, Any]


@dataclass(frozen=True)
class Setup:
    """An engine with the plugin."""

    kind: str
    """Of the model."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the plugin."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Of vLLM."""
    graphs: bool = False
    """Whether vLLM compiles the model and captures graphs, where there is a GPU."""
    forgets: bool = False
    """Whether there are more chats than the device has memory for."""
    tells_pages: bool = True
    """Whether answers show that a page is lost: rounding moves those of some as far."""


def prompts(seed: int, lengths: Iterable[int]) -> Tokens:
    """Of these lengths, each its own."""
    chance = random.Random(seed)
    return [[chance.randrange(3, 250) for _ in range(length)] for length in lengths]


def zeroed_pages() -> AbstractContextManager[None]:
    """A cache whose hits end inside pages of zeros."""
    return zeroed_copies("kv")


class Engine:
    """One engine, in this process but for its ranks."""

    def __init__(
        self,
        model: Path,
        options: Mapping[str, Any],
        arguments: Mapping[str, Any],
        *,
        graphs: bool = False,
    ) -> None:
        from vllm import LLM

        active = options.get("enabled", True)
        given: dict[str, Any] = {
            "enforce_eager": True,
            "max_model_len": MAX_MODEL_LEN,
            "kv_cache_memory_bytes": 128 << 20,
        }
        if graphs and ON_GPU:
            del given["enforce_eager"]
            sizes = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16]}
            given["compilation_config"] = sizes
        if ON_GPU:
            given |= {
                "gpu_memory_utilization": 0.05,
                "gdn_prefill_backend": "triton",
            }
        self._llm = LLM(
            model=str(model),
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_num_seqs=8,
            max_num_batched_tokens=STEP,
            disable_log_stats=True,
            enable_prefix_caching=active,
            additional_config={"hybrid_plugin": dict(options)},
            **given | dict(arguments),
        )

    def ask(self, asked: Tokens, length: int = ANSWER) -> list[Answer]:
        """Greedy answers, with what was likeliest at each of their tokens."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0,
            max_tokens=length,
            ignore_eos=True,
            detokenize=False,
            logprobs=TOP,
        )
        outputs = self._llm.generate(
            [{"prompt_token_ids": prompt} for prompt in asked], sampling, use_tqdm=False
        )
        return [
            Answer(
                tokens=tuple(output.outputs[0].token_ids),
                prompt_tokens=len(prompt),
                cached_tokens=output.num_cached_tokens or 0,
                logprobs=tuple(
                    {token: float(value.logprob) for token, value in top.items()}
                    for top in output.outputs[0].logprobs or ()
                ),
            )
            for prompt, output in zip(asked, outputs, strict=True)
        ]

    def forget(self) -> None:
        """Drop everything cached."""
        assert self._llm.reset_prefix_cache()

    @property
    def manager(self) -> Any:
        """The plugin's."""
        return self._llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager

    def described(self) -> Found:
        """What the plugin says of its cache, and vLLM of its capacity."""
        cache = self.manager.cache
        stats = dict(cache.stats.as_dict())
        if cache.host is not None:
            stats |= cache.host.stats.as_dict()
        told = self._llm.llm_engine.vllm_config.cache_config
        levels = cache.levels()
        return {
            "stats": stats,
            "used": {name: level.used for name, level in levels.items()},
            "page_size": cache.page_size,
            "rows": told.block_size,
            "capacity": told.kv_cache_size_tokens,
            "pages": told.num_gpu_blocks,
        }

    def close(self) -> None:
        """End it, for the next one."""
        from vllm.distributed import cleanup_dist_env_and_memory

        self._llm.llm_engine.engine_core.shutdown()
        del self._llm
        gc.collect()
        cleanup_dist_env_and_memory()


@dataclass
class Asked:
    """Prompts of a phase, and the answers of the plugin's engine."""

    prompts: Tokens
    answers: list[Answer]
    length: int


def turns(asked: Asked, seed: int) -> Tokens:
    """What users send after these answers."""
    more = prompts(seed, [MORE] * len(asked.prompts))
    every = zip(asked.prompts, asked.answers, more, strict=True)
    return [[*prompt, *answer.tokens, *new] for prompt, answer, new in every]


def chats(engine: Engine, done: dict[str, Asked]) -> None:
    """All phases, in their order; those that are over are in `done`."""

    def ask(phase: str, asked: Tokens, length: int = ANSWER) -> Asked:
        done[phase] = Asked(asked, engine.ask(asked, length), length)
        return done[phase]

    lengths = [200 + 37 * chat for chat in range(CHATS)]
    first = ask("first", prompts(1, lengths))
    second = ask("second", turns(first, 2))
    ask("third", turns(second, 3))
    (common,) = prompts(4, [SHARED])
    alike = [common + end for end in prompts(5, [30] * 3)]
    answers = [engine.ask([one])[0] for one in alike]
    done["shared"] = Asked(alike, answers, ANSWER)
    with refusing_pages(REFUSED_EVERY):
        crowd = ask("crowd", prompts(6, [100] * CROWD), CROWD_ANSWER)
    ask("crowd again", turns(crowd, 7))
    for phase, broken in zip(WRONG, (zeroed_snapshots, zeroed_pages), strict=True):
        engine.forget()
        again = ask("first again", prompts(1, lengths))
        with broken():
            ask(phase, turns(again, 8))


def forgotten(engine: Engine, done: dict[str, Asked]) -> None:
    """Two turns of more chats than the device has memory for."""
    asked = prompts(9, [150 + chat for chat in range(FORGOTTEN)])
    first = done["first"] = Asked(asked, engine.ask(asked), ANSWER)
    again = turns(first, 10)
    done["second"] = Asked(again, engine.ask(again), ANSWER)


def serve(model: Path, setup: Setup, asked: dict[str, Asked]) -> Found:
    """What an engine of the plugin says of itself; its answers go to `asked`.

    Those given before it fails are compared, too.
    """
    engine = Engine(
        model,
        {"enabled": True, **setup.options},
        setup.arguments,
        graphs=setup.graphs,
    )
    try:
        ask = forgotten if setup.forgets else chats
        ask(engine, asked)
        return engine.described()
    finally:
        engine.close()


class Reference:
    """vLLM without a cache, which answers each prompt once."""

    def __init__(self, model: Path, arguments: Mapping[str, Any]) -> None:
        self.engine = Engine(model, {"enabled": False}, arguments)
        self._said: dict[tuple[int, tuple[int, ...]], Answer] = {}

    def answers(self, asked: Asked) -> list[Answer]:
        """To the prompts of a phase."""
        keys = [(asked.length, tuple(prompt)) for prompt in asked.prompts]
        new = [key for key in dict.fromkeys(keys) if key not in self._said]
        said = self.engine.ask([list(tokens) for _, tokens in new], asked.length)
        self._said.update(zip(new, said, strict=True))
        return [self._said[key] for key in keys]

    def close(self) -> None:
        """End it."""
        self.engine.close()


def set_environment() -> None:
    """Before vLLM is imported: the engine's core is looked at in this process."""
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["HF_HUB_OFFLINE"] = "1"
