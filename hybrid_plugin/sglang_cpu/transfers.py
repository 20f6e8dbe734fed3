# SPDX-License-Identifier: Apache-2.0
"""SGLang's prefill/decode disaggregation between servers without a GPU, over NIXL."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from hybrid_plugin.tiers.peers.agent import is_installed, library

_ALIASES = ("", "._api", "._bindings")
"""What SGLang imports of it."""
_TRANSFERS = "HYBRID_PLUGIN_CPU_TRANSFERS"
"""Environment variable, for the processes of such a server."""


def prepare(server_args: Any) -> None:
    """Tell the processes of a server that prompts go from one server to another.

    Args:
        server_args: SGLang's.
    """
    if server_args.disaggregation_mode != "null":
        os.environ[_TRANSFERS] = "1"
        send_prefixes_with_the_rest()
        register_memory_of_the_cpu()


def send_prefixes_with_the_rest() -> None:
    """Symptom: a prefill server ends at the first hit, "expected stream to be a
    torch.Stream or torch.cuda.Stream object".

    Cause: under the overlap schedule a prefix is sent ahead, behind an event of CUDA.
    Fix: say in the environment that it goes with the rest, unless the user said
    something.
    Delete when: SGLang asks its platform for events.
    """
    os.environ.setdefault("SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX", "0")


def register_memory_of_the_cpu() -> None:
    """Symptom: a prefill or decode server does not start: NIXL knows no memory of a
    GPU, or is not found.

    Cause: SGLang says of all pools that they are a GPU's; and imports NIXL by the name
    of the package that has it for every CUDA.
    Fix: say of all memory that it is the CPU's; find the package for one CUDA.
    Delete when: SGLang asks its platform for the kind of memory.
    """
    if _TRANSFERS not in os.environ or not is_installed():
        return  # SGLang says so where it needs it
    package = library().__name__.partition(".")[0]
    for name in _ALIASES:
        sys.modules.setdefault(
            f"nixl{name}", importlib.import_module(f"{package}{name}")
        )
    agent = sys.modules["nixl._api"].nixl_agent
    for name, place in (
        ("register_memory", 1),
        ("get_xfer_descs", 1),
        ("prep_xfer_dlist", 2),
    ):
        original = getattr(agent, name)
        if not hasattr(original, "__wrapped__"):
            setattr(agent, name, _of_the_cpu(original, place))


def _of_the_cpu(original: Callable[..., Any], place: int) -> Callable[..., Any]:
    """A method of an agent whose argument at `place` says which memory is meant."""

    @functools.wraps(original)
    def method(self: Any, *given: Any, **named: Any) -> Any:
        arguments = ["DRAM" if one == "VRAM" else one for one in given[place:]]
        return original(self, *given[:place], *arguments, **named)

    return method
