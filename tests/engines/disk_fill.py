# SPDX-License-Identifier: Apache-2.0
"""Has the installed engine save first turns of chats; prints what it said.

    python -m tests.engines.disk_fill FOLDER

A test in the environment of another engine runs it by the interpreter of this one.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.engines import slow_decay
from tests.engines.drivers import Setup, installed_driver
from tests.engines.messages import Answer, Ask
from tests.engines.server import Server
from tests.engines.sessions import save_chats
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


def fill(folder: Path) -> tuple[list[Answer], dict[str, int]]:
    """Write a model, serve first turns of it, and save them.

    Returns:
        The answers, and the tokens of each session by its name.
    """
    slow_decay.write_nemotron_h(folder / MODEL)
    driver = installed_driver()
    assert driver is not None, "no engine is installed"
    with Server(driver, Setup(**setup(folder)), folder / "logs" / "fill") as server:
        answers = server.ask_all(first_turns(), 2)
        saved = save_chats(server.url, first_turns(), answers)
    return answers, saved


if __name__ == "__main__":
    said, sessions = fill(Path(sys.argv[1]))
    print(json.dumps([[answer.tokens for answer in said], sessions]))
