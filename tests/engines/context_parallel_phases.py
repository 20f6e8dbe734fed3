# SPDX-License-Identifier: Apache-2.0
"""Serves chats whose KV two GPUs share out; prints what came of each phase.

    python -m tests.engines.context_parallel_phases FOLDER NAME ...

writes models into the folder, but those that are there already, and serves each name
among `SERVED` by the plugin, all in this process.  Then vLLM without a cache answers
the same prompts: on two ranks, and on two ranks that share out KV, which says how far
vLLM is from itself.  At last it says what is wrong with each, and ends with 1 if
something is.  Where there are not two GPUs everything runs on one rank: to try this
script.
"""

from __future__ import annotations

import gc
import math
import os
import random
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hybrid_plugin.core.commands import CHUNK
from hybrid_plugin.engine import untried
from tests.engines import slow_decay
from tests.engines.compare import compare
from tests.engines.messages import Answer
from tests.engines.model_phases_vllm import refusing_pages
from tests.engines.model_workload import zeroed_copies, zeroed_snapshots
from tests.engines.phases import report

TWO_GPUS = torch.cuda.device_count() > 1
ON_GPU = torch.cuda.is_available()
RANKS: Mapping[str, Any] = {"tensor_parallel_size": 2} if TWO_GPUS else {}
DEALT: Mapping[str, Any] = (
    {**RANKS, "decode_context_parallel_size": 2} if TWO_GPUS else {}
)
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
RIGHT = ("first", "second", "third", "shared", "crowd", "crowd again", "first again")
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


HOST: Mapping[str, Any] = {"host_memory": "64MiB", "gpu_memory_budget": 12 << 20}
SERVED: Mapping[str, Setup] = {
    "elastic": Setup("mamba2", {"elastic": True}, graphs=True),
    "fixed": Setup(
        "mamba2",
        {"elastic": False, "page_size": PAGE * 2},
        {"cp_kv_cache_interleave_size": 8} if TWO_GPUS else {},
    ),
    "gated delta nets": Setup("gated delta nets", graphs=True, tells_pages=False),
    "host memory": Setup("mamba2", HOST, forgets=True),
    "latent": Setup("latent"),
}

KINDS: Mapping[str, Callable[[Path], Path]] = {
    "mamba2": partial(slow_decay.write_nemotron_h, **slow_decay.ONE_KV_HEAD),
    "gated delta nets": partial(
        slow_decay.write_qwen3_next,
        **slow_decay.ONE_KV_HEAD,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        num_experts=2,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
    ),
    "latent": partial(slow_decay.write_kimi_linear, first_k_dense_replace=4),
}
"""Without experts of which some are chosen, for rounding chooses among them, too."""


def write(folder: Path, kind: str) -> Path:
    """Write a model of a kind, unless it is there."""
    if folder.exists():
        return folder
    return slow_decay.sharpen_attention(KINDS[kind](folder))


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
        given: dict[str, Any] = {"enforce_eager": True}
        if graphs and ON_GPU:
            sizes = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16]}
            given = {"compilation_config": sizes}
        if ON_GPU:
            given |= {
                "gpu_memory_utilization": 0.2,
                "gdn_prefill_backend": "triton",
            }
        self._llm = LLM(
            model=str(model),
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=8,
            max_num_batched_tokens=STEP,
            kv_cache_memory_bytes=128 << 20,
            disable_log_stats=True,
            enable_prefix_caching=active,
            additional_config={"hybrid_plugin": dict(options)},
            **given,
            **arguments,
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
        self._engine = Engine(model, {"enabled": False}, arguments)
        self._said: dict[tuple[int, tuple[int, ...]], Answer] = {}

    def answers(self, asked: Asked) -> list[Answer]:
        """To the prompts of a phase."""
        keys = [(asked.length, tuple(prompt)) for prompt in asked.prompts]
        new = [key for key in dict.fromkeys(keys) if key not in self._said]
        said = self._engine.ask([list(tokens) for _, tokens in new], asked.length)
        self._said.update(zip(new, said, strict=True))
        return [self._said[key] for key in keys]

    def close(self) -> None:
        """End it."""
        self._engine.close()


def apart(first: Answer, second: Answer) -> float:
    """Nats between what two engines say of the first token behind a prompt, at most.

    Of the tokens that both have among their likeliest.
    """
    one, other = first.logprobs[0], second.logprobs[0]
    return max((abs(one[t] - other[t]) for t in one.keys() & other.keys()), default=9.0)


def without_numbers(answers: Sequence[Answer]) -> int:
    """How many answers have first tokens whose logprobs are no numbers."""
    return sum(any(map(math.isnan, one.logprobs[0].values())) for one in answers)


def judge(reference: Sequence[Answer], answers: Sequence[Answer]) -> Found:
    """How far answers are from the reference's."""
    found = compare(reference, answers, 0.0)
    return {
        "differing": found.differing,
        "worst_gap": min(found.worst_gap, 99.0),
        "apart": max(map(apart, reference, answers)),
        "without_numbers": without_numbers(answers),
        "wrong": list(found.wrong),
    }


def problems(setup: Setup, found: Found, ranks: int) -> list[str]:
    """What is wrong with what an engine answered and restored, a phrase each.

    Answers may be as far from stock's as those without hits are, and as vLLM's own are
    from each other (`noise`), with a margin.

    Args:
        setup: of the engine.
        found: what came of it.
        ranks: that share out the rows of a page.
    """
    if "error" in found:
        return [found["error"]]
    phases = found["phases"]
    noise = max(
        phases["first"]["apart"], *(p["noise"]["apart"] for p in phases.values())
    )
    own = max(p["noise"]["worst_gap"] for p in phases.values())
    bounds = {"apart": 2.5 * noise + 0.05, "worst_gap": min(2.5 * own, 0.3) + 0.2}
    wrong = [
        f"{phase}: {measure} is {phases[phase][measure]:.3f}, not below {bound:.3f}"
        for phase in RIGHT
        for measure, bound in bounds.items()
        if phase in phases and not phases[phase][measure] < bound
    ]
    wrong += [
        f"{phase}: apart is {phases[phase]['apart']:.3f}, and would pass for right"
        for phase in (WRONG if setup.tells_pages else WRONG[:1])
        if phase in phases and phases[phase]["apart"] < bounds["apart"]
    ]
    if found["page_size"] != found["rows"] * ranks:
        wrong.append(f"{found['rows']} rows are no page of {found['page_size']} tokens")
    if found["capacity"] != (found["pages"] - 1) * found["page_size"]:
        wrong.append(f"{found['pages']} pages hold no {found['capacity']} tokens")
    if any(found["used"].values()):
        wrong.append(f"pools lend to nobody: {found['used']}")
    tells = _forgotten_problems if setup.forgets else _hit_problems
    return wrong + list(tells(found))


def _hit_problems(found: Found) -> Iterator[str]:
    """Of how much was restored: all but the last token of each answer."""
    before = {"second": "first", "third": "second", "crowd again": "crowd"}
    for phase, first in before.items():
        answer = CROWD_ANSWER if first == "crowd" else ANSWER
        whole = [length + answer - 1 for length in found["phases"][first]["prompts"]]
        cached = found["phases"][phase]["cached"]
        if cached != whole:
            yield f"{phase}: {cached} tokens were restored, of {whole}"
    # Kernels that keep states inside a pass do so at the ends of their chunks.
    inside = found["stats"]["interior_snapshots"] > 0
    step = CHUNK if inside else found["page_size"]
    *_, shared = found["phases"]["shared"]["cached"]
    if shared != SHARED // step * step:
        yield f"shared: {shared} tokens were restored, of {SHARED}"
    if not found["stats"]["preemptions"]:
        yield "crowd: nobody was preempted"


def _forgotten_problems(found: Found) -> Iterator[str]:
    """Of what came from the host."""
    second, stats = found["phases"]["second"], found["stats"]
    if sum(second["cached"]) < 0.7 * sum(second["prompts"]):
        yield f"second: {sum(second['cached'])} tokens of {sum(second['prompts'])}"
    if ON_GPU and not stats["host_hit_tokens"] > 0.2 * stats["hit_tokens"]:
        yield f"the host gave {stats['host_hit_tokens']} of {stats['hit_tokens']}"


def main(folder: Path, names: Sequence[str]) -> int:
    """Print a line for each phase, and at last one line of JSON."""
    kinds = dict.fromkeys(SERVED[name].kind for name in names)
    models = {kind: write(folder / kind.replace(" ", "-"), kind) for kind in kinds}
    asked: dict[str, dict[str, Asked]] = {}
    found: dict[str, Found] = {}
    for name in names:
        try:
            asked[name] = {}
            setup = SERVED[name]
            setup = replace(setup, arguments={**DEALT, **setup.arguments})
            found[name] = serve(models[setup.kind], setup, asked[name])
            _say(f"{name}: {found[name]}")
        except Exception:
            _say(f"{name} FAILED\n{traceback.format_exc()}")
            found[name] = {"error": traceback.format_exc()}
    for kind, model in models.items():
        phases = [
            (name, phase, one)
            for name, of in asked.items()
            if SERVED[name].kind == kind
            for phase, one in of.items()
        ]
        try:
            if phases:
                _compare(model, phases, found)
        except Exception:
            _say(f"{kind} was NOT COMPARED\n{traceback.format_exc()}")
            for name, _, _ in phases:
                found[name]["error"] = "vLLM without a cache failed"
    ranks = DEALT.get("decode_context_parallel_size", 1)
    return reported({name: SERVED[name] for name in names}, found, ranks)


def reported(
    setups: Mapping[str, Setup], found: Mapping[str, Found], ranks: int
) -> int:
    """Say what is wrong with each engine, and print all as a line of JSON.

    Args:
        setups: by name.
        found: what came of each.
        ranks: as in `problems`.

    Returns:
        1 if something is wrong, 0 otherwise.
    """
    for name, setup in setups.items():
        found[name]["wrong"] = problems(setup, found[name], ranks)
        for one in found[name]["wrong"]:
            _say(f"{name} IS WRONG: {one}")
        if not found[name]["wrong"]:
            _say(f"{name} is right.")
    report(found)
    return int(any(one["wrong"] for one in found.values()))


def _compare(
    model: Path, phases: Sequence[tuple[str, str, Asked]], found: dict[str, Found]
) -> None:
    """Have vLLM answer what the plugin answered, and note how far they are apart."""
    stock_said = _said(model, RANKS, phases)
    try:
        dealt_said = _said(model, DEALT, phases)
    except Exception:
        _say(f"vLLM's own ranks FAILED\n{traceback.format_exc()}")
        dealt_said = stock_said
    for index, (name, phase, one) in enumerate(phases):
        result = judged(one, stock_said[index], dealt_said[index])
        found[name].setdefault("phases", {})[phase] = result
        _say(f"{name}, {phase}: {described(result)}")


def judged(one: Asked, stock: Sequence[Answer], own: Sequence[Answer]) -> Found:
    """How far the answers of a phase are from stock's.

    Args:
        one: phase.
        stock: what vLLM answers without a cache.
        own: the same, computed otherwise: how far vLLM is from itself.
    """
    return judge(stock, one.answers) | {
        "cached": [answer.cached_tokens for answer in one.answers],
        "prompts": [len(prompt) for prompt in one.prompts],
        "noise": judge(stock, own),
    }


def described(result: Found) -> str:
    """What came of a phase, for a reader."""
    noise = result["noise"]
    return (
        f"first token {result['apart']:.3f} nats from stock (vLLM's own: "
        f"{noise['apart']:.3f}); {result['differing']} of {len(result['cached'])} "
        f"answers part, at worst {result['worst_gap']:.3f} nats (own: "
        f"{noise['differing']}, {noise['worst_gap']:.3f}); without numbers "
        f"{result['without_numbers']} (own: {noise['without_numbers']}); restored "
        f"{result['cached']} of {result['prompts']}"
    )


def _said(
    model: Path, arguments: Mapping[str, Any], phases: Sequence[tuple[str, str, Asked]]
) -> list[list[Answer]]:
    """What vLLM without a cache answers in each phase."""
    reference = Reference(model, arguments)
    try:
        return [reference.answers(one) for _, _, one in phases]
    finally:
        reference.close()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def set_environment() -> None:
    """Before vLLM is imported: the engine's core is looked at in this process."""
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["HF_HUB_OFFLINE"] = "1"


if __name__ == "__main__":
    set_environment()
    os.environ[untried.TRIED] = untried.CONTEXT
    # This process may have used the device before ranks are forked from it.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    # FlashInfer's all-reduce uses NVLink's multicast, which a machine may lack.
    os.environ["VLLM_ALLREDUCE_USE_FLASHINFER"] = "0"
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:] or list(SERVED)))
