# SPDX-License-Identifier: Apache-2.0
"""Which requests a simulation replays: a file's, or generated ones."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hybrid_plugin.tools.simulate.agentic import AgenticStream
from hybrid_plugin.tools.simulate.lines import read_lines
from hybrid_plugin.tools.simulate.mooncake import read_mooncake
from hybrid_plugin.tools.simulate.request import Request, TraceError
from hybrid_plugin.tools.simulate.token_lists import read_token_lists
from hybrid_plugin.tools.simulate.weka import SessionSample, read_weka

FORMATS = ("mooncake", "tokens", "weka", "agentic")


def format_of(path: Path | None) -> str:
    """What a trace looks like, by its first line; a stream is made without one.

    A folder has conversations.

    Raises:
        TraceError: if the file cannot be read.
    """
    if path is None:
        return "agentic"
    if path.is_dir():
        return "weka"
    _, line = next(read_lines(path))
    if '"requests"' in line:
        return "weka"
    return "mooncake" if '"hash_ids"' in line else "tokens"


def without_answers(requests: Sequence[Request]) -> list[Request]:
    """The same requests, ending with the first token of their answers."""
    return [replace(request, answer=array("q")) for request in requests]


def read_trace(
    form: str,
    path: Path | None,
    *,
    seed: int,
    requests: int,
    sample: SessionSample,
) -> list[Request]:
    """The requests to replay.

    Args:
        form: one of `FORMATS`.
        path: of the trace; None for a generated one.
        seed: of a generated one.
        requests: of a generated one.
        sample: of recorded conversations.

    Raises:
        TraceError: for a file that cannot be read, is in another format, or is
            given where requests are generated.
    """
    if form == "agentic":
        if path is not None:
            raise TraceError(
                "The agentic stream is generated: leave the trace out, or say "
                "--format mooncake, tokens or weka."
            )
        return AgenticStream(requests=requests).generate(seed)
    if path is None:
        raise TraceError(f"--format {form} reads a trace: name its file.")
    if form == "weka":
        return read_weka(path, sample)
    return read_mooncake(path) if form == "mooncake" else read_token_lists(path)
