# SPDX-License-Identifier: Apache-2.0
"""The subcommand `hybrid-plugin bundle`."""

from __future__ import annotations

import argparse
import json
import sys
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
            for bundle in chosen:
                bundle.path.unlink()
    except (ConfigError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"Removed {len(chosen)} of {len(bundles)} bundles.")
    named = args.keys or args.model is not None
    return 0 if chosen or not named else 1


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
