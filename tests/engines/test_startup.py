# SPDX-License-Identifier: Apache-2.0
"""Servers that must not start: one sentence, a non-zero exit, no hanging."""

from __future__ import annotations

import re

import pytest

from tests.engines.conftest import ON_GPU, StartServer
from tests.engines.server import ServerDiedError

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(ON_GPU, reason="the sentences name the CPU's backend"),
]


@pytest.mark.parametrize(
    ("options", "flags", "fault", "sentence"),
    [
        pytest.param(
            {"pagesize": 16},
            (),
            None,
            "Unknown hybrid_plugin option 'pagesize'",
            id="unknown option",
        ),
        pytest.param(
            {"page_size": 16},
            (),
            None,
            "Page size 16 does not suit the attention backend (CPU_ATTN), which takes "
            "32, 64, 96, 128, ...",
            id="page size the backend refuses",
        ),
        pytest.param(
            {},
            ("--kv-cache-memory-bytes=1M",),
            None,
            "cannot hold one sequence of 1024 tokens",
            id="pool too small for one sequence",
        ),
        pytest.param(
            {},
            (),
            "exclude_workers",
            "hybrid-plugin is loaded in the server but not in",
            id="plugin excluded from the workers",
        ),
    ],
)
def test_server_refuses_to_start(
    start_server: StartServer,
    options: dict[str, object],
    flags: tuple[str, ...],
    fault: str | None,
    sentence: str,
) -> None:
    with (
        pytest.raises(ServerDiedError) as death,
        start_server("refused", options=options, flags=flags, fault=fault),
    ):
        pass
    assert death.value.code > 0
    assert sentence in re.sub(r"\s+", " ", death.value.log)
