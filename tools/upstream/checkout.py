# SPDX-License-Identifier: Apache-2.0
"""Whether a checkout has the tests that the expectations are about."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from expectations import Expectations


def differences(checkout: Path, expected: Expectations) -> list[str]:
    """Sentences about files that are not as of the commit; none if all are."""
    return list(_differences(checkout, expected))


def _differences(checkout: Path, expected: Expectations) -> Iterator[str]:
    for path, blob in expected.blobs.items():
        file = checkout / path
        if not file.is_file():
            yield f"{path} is not there: check out {expected.commit}."
        elif blob_of(file) != blob:
            yield f"{path} is of another commit: check out {expected.commit}."


def blob_of(file: Path) -> str:
    """The file's git object name, `git hash-object FILE`: no git is needed."""
    content = file.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
