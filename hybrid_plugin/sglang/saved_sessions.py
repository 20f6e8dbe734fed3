# SPDX-License-Identifier: Apache-2.0
"""Saved sessions between SGLang's processes: from its server to all schedulers.

Orders travel as SGLang's own control requests do: to all ranks, in one order, and the
first rank answers.  The one for its dumper carries any JSON there and back, so orders
are of that kind, under a method that no dumper has.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from hybrid_plugin.engine.session_desk import Answer, failure, without_disk
from hybrid_plugin.engine.session_routes import (
    Endpoint,
    Request,
    SessionRoutes,
    text_of,
)

METHOD = "hybrid_plugin/sessions"
"""Of a control request, which is an order then."""
SERVER = "sglang.srt.entrypoints.http_server"
_ATTACHED = "hybrid_plugin_sessions"
"""Attribute of the application's state: that it has the endpoints."""


def server_is_loaded() -> bool:
    """Whether this process has SGLang's HTTP server, started or not."""
    return SERVER in sys.modules


def attach() -> None:
    """Add the endpoints to the server of this process, once."""
    from sglang.srt.entrypoints.http_server import app, get_global_state

    if getattr(app.state, _ATTACHED, False):
        return
    setattr(app.state, _ATTACHED, True)

    async def ask(order: dict[str, Any]) -> Answer:
        from sglang.srt.managers.io_struct import DumperControlReqInput

        manager = get_global_state().tokenizer_manager
        request = DumperControlReqInput(method=METHOD, body=order)
        answers = await manager.dumper_control(request)
        if not answers[0].success:
            return failure(500, answers[0].error)
        answer: Answer = answers[0].response[0]
        return answer

    def longest() -> int:
        return int(get_global_state().tokenizer_manager.model_config.context_len)

    SessionRoutes(app, ask, _describe, longest, guard=_for_admins, key=_api_key)


def answer(tree_cache: Any, order: Mapping[str, Any]) -> Any:
    """Take an order, in a scheduler, and say what the server hears.

    Args:
        tree_cache: of the scheduler, if it is ours; None if not.
        order: see `SessionDesk.take`.
    """
    from sglang.srt.managers.io_struct import DumperControlReqOutput

    found = (
        without_disk() if tree_cache is None else tree_cache.take_session_order(order)
    )
    return DumperControlReqOutput(success=True, response=[found])


def _for_admins(endpoint: Endpoint) -> Endpoint:
    """Have an endpoint ask for `--admin-api-key` where one is set, as SGLang's do that
    change the server."""
    from sglang.srt.utils.auth import AuthLevel, auth_level

    async def guarded(request: Request) -> Any:  # methods take no marks
        return await endpoint(request)

    marked: Endpoint = auth_level(AuthLevel.ADMIN_OPTIONAL)(guarded)
    return marked


def _api_key() -> str | None:
    """What other endpoints of the server ask for, those of administrators not."""
    from sglang.srt.runtime_context import get_serving

    return get_serving().api_key or None


def _describe(request: Any, body: Mapping[str, Any]) -> dict[str, Any]:
    """What a body names beside tokens; adapters are refused where there are files."""
    return {
        "salt": text_of(body, "cache_salt"),
        "extra_key": text_of(body, "extra_key"),
    }
