# SPDX-License-Identifier: Apache-2.0
"""Engines that step beside their clients, in one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from benchmarks.prefix_workloads import Reply


def step_beside(
    stepping: Coroutine[Any, Any, None], serving: Coroutine[Any, Any, list[Reply]]
) -> list[Reply]:
    """Drive an engine that steps for ever, until the clients are done.

    An error of either ends both.
    """

    async def both() -> list[Reply]:
        steps, clients = asyncio.ensure_future(stepping), asyncio.ensure_future(serving)
        await asyncio.wait([steps, clients], return_when=asyncio.FIRST_COMPLETED)
        if steps.done():
            clients.cancel()
            steps.result()
        steps.cancel()
        return clients.result()

    return asyncio.run(both())
