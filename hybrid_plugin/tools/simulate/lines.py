# SPDX-License-Identifier: Apache-2.0
"""Lines of a trace file, and what can go wrong on the way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hybrid_plugin.tools.simulate.request import TraceError


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (number, text) of the lines that are not blank.

    Raises:
        TraceError: if the file cannot be read, is no text, or has no such line.
    """
    empty = True
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    empty = False
                    yield number, line
    except UnicodeDecodeError as error:
        raise TraceError(f"The trace {path} is no text file.") from error
    except (OSError, ValueError) as error:  # a name may be no name at all
        raise TraceError(
            f"Cannot read the trace {str(path)!r}: "
            f"{getattr(error, 'strerror', None) or error}."
        ) from error
    if empty:
        raise TraceError(f"The trace {path} has no requests.")
