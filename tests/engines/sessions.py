# SPDX-License-Identifier: Apache-2.0
"""Talks to a server about saved sessions, as a client of either engine does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import httpx

from tests.engines import web
from tests.engines.messages import Answer, Ask

PATH = "/v1/hybrid/sessions"
PATIENCE_S = 300.0


def call(
    url: str, method: str, path: str = "", body: Mapping[str, Any] | None = None
) -> httpx.Response:
    """Send a request below the endpoints."""
    return web.request(method, url + PATH + path, json=body, timeout=PATIENCE_S)


def order(
    url: str, name: str, action: str, body: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Have a session saved or loaded.

    Raises:
        httpx.HTTPStatusError: if it is not.
    """
    response = call(url, "POST", f"/{quote(name, safe='')}/{action}", body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def save_chats(
    url: str, asks: Sequence[Ask], answers: Sequence[Answer]
) -> dict[str, int]:
    """Save chats as "chat 0", "chat 1", ...; tokens of each by its name."""
    saved = {}
    for number, (ask, answer) in enumerate(zip(asks, answers, strict=True)):
        body: dict[str, Any] = {"prompt": [*ask.prompt, *answer.tokens]}
        if ask.salt is not None:
            body["cache_salt"] = ask.salt
        found = order(url, f"chat {number}", "save", body)
        assert found["given"] == len(body["prompt"])
        saved[f"chat {number}"] = found["tokens"]
    return saved


def names(url: str) -> list[str]:
    """Of all sessions."""
    response = call(url, "GET")
    response.raise_for_status()
    return sorted(one["name"] for one in response.json()["sessions"])
