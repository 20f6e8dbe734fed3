# SPDX-License-Identifier: Apache-2.0
"""Numbers on the tools' command lines."""

from __future__ import annotations

import argparse
import math


def positive(text: str) -> float:
    """A number above 0, for argparse.

    Raises:
        argparse.ArgumentTypeError: if it is none.
    """
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no number above 0")
    return number
