# SPDX-License-Identifier: Apache-2.0
"""Take the published commands of docs/recipes through an engine and the plugin.

    python ci/run_recipes.py --engine vllm            # prints, and compares
    python ci/run_recipes.py --engine vllm --write    # writes outcomes and the page

It runs where the engine is installed, without a GPU, in about a minute.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from typing import Any

from recipes import document
from recipes.book import FOLDER, load
from recipes.trial import try_all

from hybrid_plugin.tools.doctor.installed import find_engine

ROOT = FOLDER.parents[1]
OUTCOMES = FOLDER / "outcomes.json"
PAGE = FOLDER / "index.md"


def main() -> int:
    """Returns 1 if what is found is not what is recorded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=tuple(document.ENGINES), required=True)
    parser.add_argument("--write", action="store_true", help="write what is found")
    parser.add_argument("--only", default="", help="recipes whose id contains this")
    args = parser.parse_args()
    found = _found(args.engine, args.only)
    for name, outcome in found["outcomes"].items():
        print(document.line(name, outcome))
    print(document.summary(args.engine, found["version"], found["outcomes"]))
    recorded = json.loads(OUTCOMES.read_text()) if OUTCOMES.exists() else {}
    if args.write:
        _write(recorded | {args.engine: found})
        return 0
    differing = list(_differences(found, recorded.get(args.engine, {}), args.only))
    for difference in differing:
        print(f"recorded otherwise: {difference}")
    return 1 if differing else 0


def _found(engine: str, part: str) -> dict[str, Any]:
    """What becomes of an engine's recipes here."""
    installed = find_engine(engine)
    if installed is None:
        raise SystemExit(f"{engine} is not installed in this environment.")
    recipes = [recipe for recipe in load() if part in recipe.id]
    # Engines print to standard output, which is the report's.
    with contextlib.redirect_stdout(sys.stderr):
        tried = {r.id: outcome.as_json() for r, outcome in try_all(engine, recipes)}
    ordered = {r.id: tried[r.id] for r in recipes if r.id in tried}
    return {"version": installed.version, "outcomes": ordered}


def _differences(
    found: dict[str, Any], recorded: dict[str, Any], part: str
) -> list[str]:
    """What is recorded, where it is something else."""
    before = recorded.get("outcomes", {})
    names = set(found["outcomes"]) | {name for name in before if part in name}
    differing = [
        f"{name}: {before.get(name)}"
        for name in sorted(names)
        if before.get(name) != found["outcomes"].get(name)
    ]
    if recorded.get("version") != found["version"]:
        differing.append(f"version {recorded.get('version')}")
    return differing


def _write(recorded: dict[str, Any]) -> None:
    """Write what was found, and the page once both engines were asked."""
    ordered = {name: recorded[name] for name in document.ENGINES if name in recorded}
    OUTCOMES.write_text(json.dumps(ordered, indent=1) + "\n")
    if len(ordered) == len(document.ENGINES):
        PAGE.write_text(document.page(load(), ordered))


if __name__ == "__main__":
    sys.exit(main())
