# SPDX-License-Identifier: Apache-2.0
"""Serves models with KV of 8 bits, by stock vLLM and the plugin; prints the answers.

python -m tests.engines.kv_type_phases_vllm FOLDER MODEL:TYPE ...
"""

from __future__ import annotations

import gc
import random
import sys
from pathlib import Path
from typing import Any

from tests.engines import slow_decay
from tests.engines.model_phases_vllm import VllmEngine, set_environment
from tests.engines.model_workload import ANSWER, Tokens, zeroed_snapshots
from tests.engines.phases import report
from tests.models.kinds import KINDS

PROMPTS = (150, 97, 64, 200)
"""Lengths of first turns: within pages, at their ends, and beyond a step."""
CLASSES = {kind.name: kind.architecture for kind in KINDS}
Found = dict[str, Any]


def chats(engine: VllmEngine, *, lossy: bool) -> Found:
    """Three turns of some chats.

    Args:
        engine: that answers them.
        lossy: whether the last turns are answered without the states they go on from.
    """
    rng = random.Random(3)
    first = [[rng.randrange(3, 250) for _ in range(count)] for count in PROMPTS]
    found: Found = {}

    def ask(phase: str, prompts: Tokens) -> Tokens:
        answers, found[f"{phase}, cached"] = engine.ask(prompts, ANSWER)
        found[phase] = answers
        return answers

    answers = ask("first", first)
    second = [p + a + [7] * 20 for p, a in zip(first, answers, strict=True)]
    answers = ask("second", second)
    third = [p + a + [9] * 20 for p, a in zip(second, answers, strict=True)]
    if lossy:
        with zeroed_snapshots():
            ask("zeroed", third)
    else:
        ask("third", third)
    return found


def serve(model: Path, kind: str, dtype: str, *, plugin: bool) -> Found:
    """What an engine answers, which is gone then."""
    from vllm.distributed import cleanup_dist_env_and_memory

    options: dict[str, Any] = {"enabled": plugin}
    if kind in CLASSES:
        options["models"] = [CLASSES[kind]]
    engine = VllmEngine(
        model,
        kv_cache_dtype=dtype,
        enable_prefix_caching=plugin,
        additional_config={"hybrid_plugin": options},
    )
    found = chats(engine, lossy=plugin)
    del engine
    gc.collect()
    cleanup_dist_env_and_memory()
    return found


def main(folder: Path, cases: list[str]) -> None:
    """Print one line of JSON."""
    found: dict[str, dict[str, Found]] = {}
    for case in cases:
        kind, dtype = case.split(":")
        model = folder / kind
        if not model.exists():
            getattr(slow_decay, f"write_{kind}")(model)
        found[case] = {
            "stock": serve(model, kind, dtype, plugin=False),
            "plugin": serve(model, kind, dtype, plugin=True),
        }
    report(found)


if __name__ == "__main__":
    set_environment()
    main(Path(sys.argv[1]), sys.argv[2:])
