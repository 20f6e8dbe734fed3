# SPDX-License-Identifier: Apache-2.0
"""Saved sessions between vLLM's processes: from the API server to the engine core.

An API server may be one of several, and none has the cache.  Orders go to the engine
core as a utility call, as vLLM's own go that reset its prefix cache.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hybrid_plugin.engine.session_desk import failure
from hybrid_plugin.engine.session_routes import SessionRoutes, text_of
from hybrid_plugin.vllm.activation import is_active
from hybrid_plugin.vllm.adapters import Adapters, namespace_of

if TYPE_CHECKING:
    from fastapi import FastAPI

CALL = "hybrid_sessions"
"""Name of the engine core's method."""
_INACTIVE = (
    "hybrid-plugin does not serve this model, so there are no sessions; the log says "
    "why"
)


@dataclass(frozen=True, slots=True)
class Adapter:
    """What of vLLM's `LoRARequest` names an adapter."""

    lora_name: str
    lora_int_id: int
    lora_path: str
    load_inplace: bool


def attach(app: FastAPI) -> None:
    """Add the endpoints to an API server."""

    async def ask(order: dict[str, Any]) -> dict[str, Any]:
        client = app.state.engine_client
        if not is_active(client.vllm_config):
            return failure(404, _INACTIVE)
        text = await client.engine_core.call_utility_async(CALL, json.dumps(order))
        answer: dict[str, Any] = json.loads(text)
        return answer

    def longest() -> int:
        return int(app.state.engine_client.vllm_config.model_config.max_model_len)

    SessionRoutes(app, ask, _describe, longest)


def take(engine_core: Any, order: str) -> str:
    """Take an order, in the engine core; both are JSON.

    Args:
        engine_core: of vLLM.
        order: see `SessionDesk.take`.
    """
    manager = engine_core.scheduler.kv_cache_manager
    return json.dumps(manager.take_session_order(json.loads(order)))


def namespace(order: Mapping[str, Any], adapters: Adapters) -> Hashable:
    """What a request with the adapter and the salt of an order has in common."""
    adapter = order.get("adapter")
    lora = None if adapter is None else Adapter(**adapter)
    return namespace_of(lora, order.get("salt"), adapters)


def _describe(request: Any, body: Mapping[str, Any]) -> dict[str, Any]:
    """The adapter that a body names as its model, and its salt."""
    models = request.app.state.openai_serving_models
    lora = models.lora_requests.get(text_of(body, "model"))
    adapter = None
    if lora is not None:
        adapter = Adapter(
            lora.lora_name, lora.lora_int_id, lora.lora_path, lora.load_inplace
        )
    return {
        "salt": text_of(body, "cache_salt"),
        "adapter": None if adapter is None else asdict(adapter),
    }
