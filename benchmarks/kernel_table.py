# SPDX-License-Identifier: Apache-2.0
"""The table `AS_FAST` of `hybrid_plugin/engine/kernel_choice.py`, from measurements.

A kind of layer and a phase are in it if ours had at least `--least` of the speed of
each engine's at every measured size, prefills also up to the largest size before the
first that was slower.  Prints the table for that file, and the ratios as Markdown.

    python -m benchmarks.kernel_table benchmarks/results/kernels-h200.json \
        benchmarks/results/kernels-flashinfer-h200.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.kernel_speed.report import LEAST
from benchmarks.kernel_speed.verdict import as_fast, as_markdown, as_python, compared


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the results and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="+", help="JSON of kernels.py")
    parser.add_argument(
        "--least",
        type=float,
        default=LEAST,
        help="ratio of an engine's time to ours that counts as fast (%(default)s)",
    )
    args = parser.parse_args(arguments)
    documents = [json.loads(path.read_text()) for path in args.results]
    for document in documents:
        versions = document["versions"].items()
        print(", ".join(f"{name} {value}" for name, value in versions))
    rows = [row for document in documents for row in document["rows"]]
    found = list(compared(rows))
    print("", as_markdown(found, args.least), "", sep="\n")
    print("```python", as_python(as_fast(found, args.least)), "```", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
