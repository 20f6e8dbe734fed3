# SPDX-License-Identifier: Apache-2.0
"""Serves chats whose KV has scales beside it; prints what came of each phase.

    python -m tests.engines.kv_scale_phases_vllm FOLDER TYPE ...

writes a model into the folder and serves each type of `SERVED` by the plugin, all in
this process.  Then vLLM without a cache answers the same prompts with KV of the same
type, all of a phase at once, and again one by one, which says how far vLLM is from
itself.  At last it says what is wrong with each, and ends with 1 if something is.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from hybrid_plugin.engine import untried
from tests.engines.chat_verdicts import described, judged, reported
from tests.engines.chats_vllm import (
    Asked,
    Engine,
    Found,
    Reference,
    Setup,
    serve,
    set_environment,
)
from tests.engines.messages import Answer
from tests.engines.slow_decay import ONE_KV_HEAD, sharpen_attention, write_nemotron_h

KIND = "mamba2"


def setup(dtype: str) -> Setup:
    """The plugin's defaults, in graphs."""
    return Setup(KIND, {}, {"kv_cache_dtype": dtype}, graphs=True)


SERVED: Mapping[str, Setup] = {
    dtype: setup(dtype) for dtype in ("int8_per_token_head", "fp8_per_token_head")
}
"""By the type of KV; others can be named, too."""


def one_by_one(
    model: Path, dtype: str, asked: Mapping[str, Asked]
) -> dict[str, list[Answer]]:
    """What vLLM without a cache answers where nothing else runs."""
    engine = Engine(model, {"enabled": False}, {"kv_cache_dtype": dtype})
    try:
        return {
            phase: [engine.ask([prompt], one.length)[0] for prompt in one.prompts]
            for phase, one in asked.items()
        }
    finally:
        engine.close()


def compare_with_stock(
    model: Path, dtype: str, asked: Mapping[str, Asked]
) -> dict[str, Found]:
    """How far each phase is from vLLM without a cache."""
    reference = Reference(model, {"kv_cache_dtype": dtype})
    try:
        stock = {phase: reference.answers(one) for phase, one in asked.items()}
    finally:
        reference.close()
    own = one_by_one(model, dtype, asked)
    return {
        phase: judged(one, stock[phase], own[phase]) for phase, one in asked.items()
    }


def main(folder: Path, dtypes: Sequence[str]) -> int:
    """Print a line for each phase, and at last one line of JSON."""
    model = sharpen_attention(write_nemotron_h(folder / KIND, **ONE_KV_HEAD))
    found: dict[str, Found] = {}
    for dtype in dtypes:
        asked: dict[str, Asked] = {}
        try:
            found[dtype] = serve(model, setup(dtype), asked)
            found[dtype]["phases"] = compare_with_stock(model, dtype, asked)
        except Exception:
            found[dtype] = {"error": traceback.format_exc()}
        for phase, result in found[dtype].get("phases", {}).items():
            print(f"{dtype}, {phase}: {described(result)}", file=sys.stderr)
    return reported({dtype: setup(dtype) for dtype in dtypes}, found, ranks=1)


if __name__ == "__main__":
    set_environment()
    os.environ[untried.TRIED] = untried.SCALES
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:] or list(SERVED)))
