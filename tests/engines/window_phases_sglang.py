# SPDX-License-Identifier: Apache-2.0
"""Serves a model with windows by SGLang and the plugin; prints what came out.

    python -m tests.engines.window_phases_sglang FOLDER

writes the model into the folder and runs SGLang's scheduler in this process, without
the processes around it, so that the pools can be observed after each step, and SGLang
is imported once.  At last the chats are served with a map that is broken on purpose,
which the comparison must notice.
"""

from __future__ import annotations

import json
import os
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.engines import slow_decay
from tests.engines.greedy import gaps
from tests.engines.messages import Answer, Ask
from tests.engines.phases import report
from tests.engines.window_phases import (
    ANSWER,
    CROWD_ANSWER,
    LONG_ANSWER,
    MAX_MODEL_LEN,
    PAGE,
    STEP,
    Found,
    Tokens,
    workload,
)
from tests.sglang.broken_map import forgotten_hits

BUDGET = 4 << 20
"""Enough for the chats, too little for the crowd."""
RATIO = 0.4
OPTIONS = {"page_size": PAGE, "gpu_memory_budget": BUDGET}
FLAGS = (
    "--enable-hybrid-plugin",
    f"--hybrid-config={json.dumps(OPTIONS)}",
    "--dtype=float32",
    "--skip-tokenizer-init",
    f"--context-length={MAX_MODEL_LEN}",
    f"--chunked-prefill-size={STEP}",
    "--max-running-requests=8",
    f"--swa-full-tokens-ratio={RATIO}",
)
RETRACT_EVERY = 40
"""Steps of the crowd, for SGLang retracts hardly ever by itself."""


class Engine:
    """SGLang's scheduler, fed and read in this process."""

    def __init__(self, model: Path, flags: Sequence[str] = FLAGS) -> None:
        """Load a model, with the plugin."""
        from sglang.srt.plugins import load_plugins

        sys.argv += flags  # what asks for the plugin in a server
        load_plugins()
        from sglang.srt.managers.scheduler import Scheduler
        from sglang.srt.runtime_context import SpawnRanks, publish
        from sglang.srt.server_args import PortArgs, prepare_server_args

        arguments = prepare_server_args([f"--model-path={model}", *flags])
        arguments.resolve_once()
        ranks = SpawnRanks(world_rank=0, gpu_id=0)
        publish(arguments, role="scheduler", ranks=ranks)
        self.scheduler: Any = Scheduler(arguments, PortArgs.init_new(arguments))
        self.cache: Any = self.scheduler.tree_cache
        self.scheduler.ingest_requests = self._ingest
        self._waiting: list[Any] = []
        self._ended: dict[str, Any] = {}
        self._expected = 0
        self.levels: list[dict[str, int]] = []
        """Ids in use of each pool, after each step."""
        self._watch()

    def ask(self, prompts: Tokens, length: int) -> tuple[Tokens, list[int]]:
        """Answers, and the tokens that were restored for each."""
        self._ended.clear()
        self._expected = len(prompts)
        self._waiting = [_request(i, p, length) for i, p in enumerate(prompts)]
        self.scheduler.gracefully_exit = False
        self.scheduler.run_event_loop()
        reqs = [self._ended[str(index)] for index in range(len(prompts))]
        return [list(req.output_ids) for req in reqs], [r.cached_tokens for r in reqs]

    def _ingest(self) -> None:
        """What SGLang's loop asks for requests: all at once, and an end behind them."""
        self.scheduler.process_input_requests(self._waiting)
        self._waiting = []
        idle = self.scheduler.last_batch is None and not self.scheduler.result_queue
        if idle and len(self._ended) == self._expected:
            self.scheduler.gracefully_exit = True

    def _watch(self) -> None:
        launched, released = self.cache.step_launched, self.cache.on_release

        def step_launched(batch: Any) -> None:
            launched(batch)
            levels = self.cache.cache.levels().items()
            self.levels.append({str(pool): one.used for pool, one in levels})

        def on_release(req: Any, *, checkpointed: bool) -> None:
            released(req, checkpointed=checkpointed)
            if req.finished():
                self._ended[req.rid] = req

        self.cache.step_launched, self.cache.on_release = step_launched, on_release


def _request(index: int, prompt: list[int], length: int) -> Any:
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    sampling = SamplingParams(max_new_tokens=length, temperature=0, ignore_eos=True)
    sampling.normalize(None)
    return TokenizedGenerateReqInput(
        rid=str(index),
        input_text=None,
        input_ids=array("q", prompt),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=sampling,
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=False,
    )


def serve(engine: Engine, model: Path) -> Found:
    """Serve all phases, and the chats again on the broken map."""
    from sglang.srt.managers import scheduler

    found: Found = {"tokens": {}, "cached": {}, "levels": {}, "gaps": {}}
    prompts = workload()

    def ask(phase: str, asked: Tokens, length: int = ANSWER) -> None:
        answers, cached = engine.ask(asked, length)
        found["tokens"][phase], found["cached"][phase] = answers, cached
        asks = [Ask(tuple(prompt), length) for prompt in asked]
        found["gaps"][phase] = list(
            gaps(model, asks, [Answer(tuple(answer)) for answer in answers])
        )
        found["levels"][phase] = engine.levels[:]
        engine.levels.clear()

    def second_turns(phase: str) -> Tokens:
        said = found["tokens"][phase]
        turns = zip(prompts[phase], said, prompts["more"], strict=False)
        return [prompt + answer + more for prompt, answer, more in turns]

    ask("alone", prompts["first"][:1], LONG_ANSWER)
    ask("first", prompts["first"])
    ask("second", second_turns("first"))
    for index, prompt in enumerate(prompts["shared"]):
        ask(f"shared {index}", [prompt])
    scheduler.TEST_RETRACT_INTERVAL, scheduler.TEST_RETRACT = RETRACT_EVERY, True
    ask("crowd", prompts["crowd"], CROWD_ANSWER)
    scheduler.TEST_RETRACT = False
    ask("crowd again", second_turns("crowd")[::-1])  # the last ones are still there
    core = engine.cache.cache
    found["stats"] = core.stats.as_dict()
    found["pages"] = {
        str(pool): pages.capacity for pool, pages in core.memory.page_pools.items()
    }
    engine.cache.reset()
    ask("first", prompts["first"])
    with forgotten_hits():
        ask("broken", second_turns("first"))
    return found


def main(folder: Path) -> None:
    """Print one line of JSON."""
    model = slow_decay.write_laguna(folder)
    report(serve(Engine(model), model))


if __name__ == "__main__":
    os.environ["SGLANG_PLATFORM"] = "hybrid_cpu"
    os.environ["HF_HUB_OFFLINE"] = "1"
    # SGLang's own count of all places of both pools, after each step.
    os.environ["SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY"] = "1"
    main(Path(sys.argv[1]))
