# SPDX-License-Identifier: Apache-2.0
"""Hook points: the places in an engine that an adapter relies on.

An adapter declares its points as data, in a module that imports without the
engine.  They are checked twice by the same rules: live, in the process that is
about to serve, and in the source of an unpacked wheel, which takes neither an
import nor a GPU.
"""

from hybrid_plugin.upstream.hookpoints.interface import Interface
from hybrid_plugin.upstream.hookpoints.live import LiveView, resolve
from hybrid_plugin.upstream.hookpoints.point import (
    Contract,
    Definition,
    Finding,
    HookPoint,
    NotThereError,
    Status,
    View,
    check,
    problems,
    version_number,
)
from hybrid_plugin.upstream.hookpoints.source import SourceView

__all__ = [
    "Contract",
    "Definition",
    "Finding",
    "HookPoint",
    "Interface",
    "LiveView",
    "NotThereError",
    "SourceView",
    "Status",
    "View",
    "check",
    "problems",
    "resolve",
    "version_number",
]
