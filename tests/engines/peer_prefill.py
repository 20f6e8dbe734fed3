# SPDX-License-Identifier: Apache-2.0
"""Has the installed engine compute prompts for another server, until its input ends.

    python -m tests.engines.peer_prefill FOLDER

It writes a model, and prints the server's URL.  A test in the environment of another
engine runs it by the interpreter of this one.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.engines import slow_decay
from tests.engines.drivers import Setup, installed_driver
from tests.engines.peer_servers import OPTIONS
from tests.engines.server import Server

MODEL = "model"


def setup(folder: Path) -> Mapping[str, Any]:
    """Of a server with that model, whichever engine it is."""
    return {"model": folder / MODEL, "dtype": "float32", "options": OPTIONS}


def main(folder: Path) -> None:
    """Serve."""
    slow_decay.write_nemotron_h(folder / MODEL)
    driver = installed_driver()
    assert driver is not None, "no engine is installed"
    with Server(driver, Setup(**setup(folder)), folder / "prefill.log") as server:
        print(server.url, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
