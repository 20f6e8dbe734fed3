# SPDX-License-Identifier: Apache-2.0
"""The subcommand `hybrid-plugin bundle`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hybrid_plugin.tools.bundle.listing import Listed

_TEXT = "list, check or remove the bundles that servers left in a folder"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand to the command line."""
    bundle = commands.add_parser("bundle", help=_TEXT, description=_TEXT)
    actions = bundle.add_subparsers(required=True, metavar="ACTION")
    text = "list bundles, the last used first"
    ls = actions.add_parser("ls", help=text, description=text)
    ls.add_argument("--json", action="store_true", help="print JSON")
    ls.set_defaults(run=_ls)
    text = "read all bundles and compare their checksums; exits with 1 if one is bad"
    verify = actions.add_parser("verify", help=text, description=text)
    verify.set_defaults(run=_verify)
    text = "remove bundles; not while a server uses the folder"
    rm = actions.add_parser("rm", help=text, description=text)
    rm.set_defaults(run=_rm)
    for action in (ls, verify, rm):
        action.add_argument("folder", type=Path, metavar="FOLDER")
    rm.add_argument("keys", nargs="*", metavar="KEY", help="or the beginning of one")
    rm.add_argument("--all", action="store_true", help="all of them")
    rm.add_argument("--damaged", action="store_true", help="those that verify finds")
    rm.add_argument("--model", metavar="MODEL", help="those of a model, as ls shows it")
    text = "also what saved sessions keep, and those sessions; or it stays"
    rm.add_argument("--with-sessions", action="store_true", help=text)


def _ls(args: argparse.Namespace) -> int:
    from hybrid_plugin.tools.bundle import listing

    bundles = listing.read(args.folder)
    if bundles is None:
        return _no_folder(args.folder)
    if args.json:
        print(json.dumps([listing.as_json(bundle) for bundle in bundles], indent=2))
    else:
        print("\n".join(listing.as_lines(bundles)))
    return 0


def _verify(args: argparse.Namespace) -> int:
    from hybrid_plugin.tools.bundle import listing

    bundles = listing.read(args.folder, whole=True)
    if bundles is None:
        return _no_folder(args.folder)
    bad = [bundle for bundle in bundles if bundle.failure is not None]
    for bundle in bad:
        print(f"{bundle.path}: {bundle.failure}")
    print(f"{len(bundles) - len(bad)} of {len(bundles)} bundles are in order.")
    return 1 if bad else 0


def _rm(args: argparse.Namespace) -> int:
    from hybrid_plugin.errors import ConfigError
    from hybrid_plugin.tools.bundle import listing

    wanted = [bool(args.keys), args.all, args.damaged, args.model is not None]
    if sum(wanted) != 1:
        print("Name either keys, or --all, --damaged or --model.", file=sys.stderr)
        return 2
    try:
        with listing.held(args.folder):
            bundles = listing.read(args.folder, whole=args.damaged)
            if bundles is None:
                return _no_folder(args.folder)
            chosen = [bundle for bundle in bundles if _is_chosen(bundle, args)]
            kept = _give_up_sessions(chosen, args)
            gone = [bundle for bundle in chosen if bundle.path not in kept]
            for bundle in gone:
                bundle.path.unlink()
    except (ConfigError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"Removed {len(gone)} of {len(bundles)} bundles.")
    if len(gone) < len(chosen):
        print(
            f"{len(chosen) - len(gone)} stay, which saved sessions keep: remove the "
            "sessions, or give --with-sessions."
        )
    named = args.keys or args.model is not None
    return 0 if gone or not named else 1


def _give_up_sessions(chosen: Sequence[Listed], args: argparse.Namespace) -> set[Path]:
    """Remove the sessions that bundles belong to, if that is asked for.

    Returns:
        Files of bundles that sessions keep nevertheless.
    """
    from hybrid_plugin.tools.bundle import listing

    # Of what cannot be read nobody has any use, whoever keeps it.
    going = {bundle.path for bundle in chosen if bundle.failure is None}
    kept: set[Path] = set()
    for path, session in listing.sessions(args.folder):
        needed = listing.kept_by(path, session) & going
        if not args.with_sessions:
            kept |= needed
        elif needed:
            path.unlink()
    return kept


def _is_chosen(bundle: Listed, args: argparse.Namespace) -> bool:
    if args.damaged:
        return bundle.failure is not None
    if args.model is not None:
        return bool(args.model) and bundle.model.startswith(args.model)
    return bool(args.all) or any(
        key and bundle.key.startswith(key) for key in args.keys
    )


def _no_folder(folder: Path) -> int:
    print(f"There is no folder {folder}.", file=sys.stderr)
    return 1
