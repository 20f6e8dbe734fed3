# SPDX-License-Identifier: Apache-2.0
"""Resolves SGLang's arguments as a server that starts, once for each line of stdin.

A line has flags and variables of the environment, as JSON.  SGLang and what the plugin
hooks are imported once; each line has a process of its own, which is forked before any
plugin is loaded.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence

FOUND = "FOUND "
"""Begins a line with what was found; null after an error, which stderr has."""


def resolve(flags: Sequence[str], variables: Mapping[str, str]) -> tuple[str, int]:
    """Backend and page size, in a process that does nothing else."""
    from sglang.srt.arg_groups import overrides
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    os.environ.update(variables)
    load_plugins()
    # It reads where metrics go as it is imported, and SGLang has not said so yet.
    assert "prometheus_client" not in sys.modules
    arguments = prepare_server_args(list(flags))
    arguments.resolve_once()
    view = overrides.resolved_view(arguments)
    return view.radix_cache_backend, view.page_size


def main() -> None:
    """Fork for each line."""
    from sglang.srt import server_args  # noqa: F401
    from sglang.srt.arg_groups import overrides  # noqa: F401

    from hybrid_plugin.sglang.contracts import ENGINE_HOOKS
    from hybrid_plugin.upstream.hookpoints import LiveView, problems
    from tests.engines.drivers import hook_names

    hook_names.bind_no_methods()
    problems(ENGINE_HOOKS, LiveView("sglang"))
    for line in sys.stdin:
        flags, variables = json.loads(line)
        process = os.fork()
        if process:
            _, status = os.waitpid(process, 0)
            if status:
                print(f"{FOUND}null", flush=True)
            continue
        print(FOUND + json.dumps(resolve(flags, variables)), flush=True)
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
