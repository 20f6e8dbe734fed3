# SPDX-License-Identifier: Apache-2.0
"""Serves chats whose first turns another process left on disk; prints what came out.

    python -m tests.engines.disk_phases FOLDER NAME ...

A name "fill ..." writes a model, has stock vLLM answer all turns without a cache, and
fills files with the first turns; what was said is kept beside them.  Other names serve
the second turns as `RETURNS` says, each engine on a copy of the files.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.engines import slow_decay
from tests.engines.bundle_files import files_of, flip_a_bit_in_each, zero_states
from tests.engines.host_phases import FIRST, HOST, Found, Served, chats, second_turns
from tests.engines.phases import report

SIZE = "1GiB"
SESSION = "tea"
FEW = 3
"""Bundles for which a small disk has room."""
MODELS, FILES, SAID = "model", "files", "said.json"
RANKS: Mapping[str, Any] = {"tensor_parallel_size": 2}
OF_RANKS = {**HOST, "gpu_memory_budget": HOST["gpu_memory_budget"] // 2}
OF_WINDOWS = {
    "enabled": True,
    **HOST,
    "gpu_memory_budget": HOST["gpu_memory_budget"] * 3 // 4,
}


@dataclass(frozen=True)
class Return:
    """An engine that is started on files of another process."""

    options: Mapping[str, Any] = field(default_factory=lambda: dict(HOST))
    """Of the plugin, the disk's excepted."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    change: Callable[[Path], object] = files_of
    """What becomes of the files before."""
    size: Callable[[Path], str] = lambda files: SIZE
    model: Callable[[Path], Path] | None = None
    """Another model, written to a folder."""


def _few(files: Path) -> str:
    return str(FEW * max(file.stat().st_size for file in files_of(files)))


def _other_weights(folder: Path) -> Path:
    return slow_decay.write_nemotron_h(folder, seed=1)


RETURNS: Mapping[str, Return] = {
    "elastic": Return({"elastic": True, **HOST}),
    "fixed": Return({"elastic": False, **HOST}),
    "flipped": Return(change=flip_a_bit_in_each),
    "zeroed": Return(change=zero_states),
    "few": Return(size=_few),
    "other model": Return(model=_other_weights),
    "two ranks": Return(OF_RANKS, RANKS),
    "windows": Return(OF_WINDOWS),
}
FILLS: Mapping[str, tuple[str, Mapping[str, Any], Mapping[str, Any]]] = {
    "fill nemotron_h": ("nemotron_h", HOST, {}),
    "fill two ranks": ("nemotron_h", OF_RANKS, RANKS),
    "fill windows": ("gemma3", OF_WINDOWS, {}),
}
"""Kind of the model, options of the plugin, and arguments of vLLM."""


def on_disk(folder: Path, size: str = SIZE) -> dict[str, Any]:
    """The option."""
    return {"disk": {"path": str(folder), "size": size}}


def fill(
    folder: Path, kind: str, options: Mapping[str, Any], arguments: Mapping[str, Any]
) -> Found:
    """Have first turns on disk, and know what second turns are answered."""
    model = getattr(slow_decay, f"write_{kind}")(folder / MODELS)
    engine = Served(model, {"enabled": False})
    stock = chats(engine)
    engine.close()
    saves = "tensor_parallel_size" in arguments
    found = serve(model, folder / FILES, options, FIRST, arguments, is_saved=saves)
    (folder / SAID).write_text(json.dumps(stock))
    return {"stock": stock, "filled": found}


def serve(
    model: Path,
    files: Path,
    options: Mapping[str, Any],
    prompts: list[list[int]],
    arguments: Mapping[str, Any],
    *,
    size: str = SIZE,
    is_flushed: bool = False,
    is_saved: bool = False,
    is_loaded: bool = False,
) -> Found:
    """Serve prompts in an engine with files behind it, until all is written.

    Args:
        model: its folder.
        files: the folder of the disk.
        options: of the plugin, the disk's excepted.
        prompts: to be answered.
        arguments: of vLLM.
        size: of the disk.
        is_flushed: whether everything is forgotten at the end.
        is_saved: whether the first chat is saved as a session.
        is_loaded: whether that session is loaded before.
    """
    engine = Served(model, {**options, **on_disk(files, size)}, **arguments)
    loaded = engine.order(action="load", name=SESSION) if is_loaded else None
    found = engine.ask(prompts)
    found["loaded"] = loaded
    engine.finish()
    if is_saved:
        tokens = [*prompts[0], *found["tokens"][0]]
        found["saved"] = engine.order(
            action="save", name=SESSION, tokens=tokens, created=7
        )
    found["stats"], found["levels"] = engine.counts(), engine.levels()
    found["used"] = engine.manager.cache.lower_tiers.outer[0].used_bytes
    found["sizes"] = [file.stat().st_size for file in files_of(files)]
    if is_flushed:
        found["flushed"] = engine.llm.reset_prefix_cache()
        engine.finish()
    engine.close()
    return found


def come_back(folder: Path, name: str) -> Found:
    """Serve second turns as a name says."""
    setup, said = RETURNS[name], json.loads((folder / SAID).read_text())
    files = folder / name
    shutil.copytree(folder / FILES, files)
    setup.change(files)
    model = folder / MODELS
    if setup.model is not None:
        model = setup.model(folder / "another model")
    turns = second_turns(said["first"]["tokens"])
    found = serve(
        model,
        files,
        setup.options,
        turns,
        setup.arguments,
        size=setup.size(files),
        is_flushed=True,
        is_loaded="tensor_parallel_size" in setup.arguments,
    )
    found["after the flush"] = len(files_of(files))
    shutil.rmtree(files)
    return found


def main(folder: Path, names: list[str]) -> None:
    """Print one line of JSON."""
    if names[0] in FILLS:
        report(fill(folder, *FILLS[names[0]]))
    else:
        report({name: come_back(folder, name) for name in names})


if __name__ == "__main__":
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["TRITON_F32_DEFAULT"] = "ieee"
    main(Path(sys.argv[1]), sys.argv[2:])
