# SPDX-License-Identifier: Apache-2.0
"""Has the installed engine leave first turns of chats in files; prints what it said.

    python -m tests.engines.disk_fill FOLDER

A test in the environment of another engine runs it by the interpreter of this one.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.engines import slow_decay
from tests.engines.drivers import Setup, installed_driver
from tests.engines.messages import Answer, Ask
from tests.engines.server import Server
from tests.engines.traffic import encode, system_prompt

MODEL, FILES = "model", "files"
CHATS = 5


def setup(folder: Path, files: str = FILES) -> Mapping[str, Any]:
    """Of a server on that folder, whichever engine it is."""
    disk = {"path": str(folder / files), "size": "1GiB"}
    return {
        "model": folder / MODEL,
        "dtype": "float32",
        "options": {"elastic": False, "host_memory": "64MiB", "disk": disk},
        "pools": (120, 16),
    }


def first_turns() -> list[Ask]:
    """Prompts that begin differently."""
    texts = [f"{n}. {system_prompt(random.Random(n), 330)} And?" for n in range(CHATS)]
    return [Ask(encode(text), 12, logprobs=5) for text in texts]


def wait_until_written(server: Server) -> dict[str, float]:
    """What is noted for writing is written one after the other, while steps are made.

    Returns:
        The metrics then.
    """
    before = -1.0
    for _ in range(120):
        server.ask(encode("tick"), 1)
        levels = server.metrics()
        if levels["disk_stores"] == before:
            return levels
        before = levels["disk_stores"]
        time.sleep(1.0)
    raise AssertionError("it goes on writing")


def fill(folder: Path) -> list[Answer]:
    """Write a model, and serve first turns of it."""
    slow_decay.write_nemotron_h(folder / MODEL)
    driver = installed_driver()
    assert driver is not None, "no engine is installed"
    with Server(driver, Setup(**setup(folder)), folder / "logs" / "fill") as server:
        answers = server.ask_all(first_turns(), 2)
        assert wait_until_written(server)["disk_stores"] >= CHATS
    return answers


if __name__ == "__main__":
    print(json.dumps([answer.tokens for answer in fill(Path(sys.argv[1]))]))
