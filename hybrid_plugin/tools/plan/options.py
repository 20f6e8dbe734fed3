# SPDX-License-Identifier: Apache-2.0
"""Command line options that say what model and what memory is meant."""

from __future__ import annotations

import argparse
from pathlib import Path

from hybrid_plugin.config import ConfigError
from hybrid_plugin.sizes import parse_bytes
from hybrid_plugin.tools.plan.budget import CacheBudget, cache_budget
from hybrid_plugin.tools.plan.model import load_shape
from hybrid_plugin.tools.plan.shape import ModelShape


def add_model_options(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Add the options that `read_shape` and `read_budget` read."""
    group = parser.add_argument_group("model and memory")
    group.add_argument(
        "--model-config",
        type=Path,
        required=required,
        metavar="CONFIG.json",
        help="config.json of the model, or the folder it lies in",
    )
    group.add_argument(
        "--gpu-memory",
        required=required,
        metavar="SIZE",
        help="memory of one GPU, such as 80GB",
    )
    group.add_argument(
        "--gpu-utilization",
        type=float,
        default=0.9,
        metavar="SHARE",
        help="share of it that the engine may use (%(default)s)",
    )
    group.add_argument(
        "--weights",
        metavar="SIZE",
        help="weights on one GPU; by default the checkpoint's size, or an estimate",
    )
    group.add_argument(
        "--tensor-parallel",
        type=int,
        default=1,
        metavar="N",
        help="GPUs that share each layer (%(default)s)",
    )
    group.add_argument("--kv-dtype", metavar="TYPE", help="by default the model's")
    group.add_argument(
        "--state-dtype", metavar="TYPE", help="by default what each engine chooses"
    )


def read_shape(args: argparse.Namespace) -> ModelShape:
    """The model that is meant.

    Raises:
        ConfigError: if the options make no sense.
    """
    if not 1 <= args.tensor_parallel <= 1024:
        raise ConfigError(
            "--tensor-parallel must lie between 1 and 1024, got "
            f"{args.tensor_parallel}."
        )
    return load_shape(
        args.model_config,
        ranks=args.tensor_parallel,
        kv_dtype=args.kv_dtype,
        state_dtype=args.state_dtype,
    )


def read_budget(args: argparse.Namespace, shape: ModelShape) -> CacheBudget:
    """The memory that is meant.

    Raises:
        ConfigError: if the options make no sense.
    """
    if not 0 < args.gpu_utilization <= 1:
        raise ConfigError(
            "--gpu-utilization must be more than 0 and at most 1, got "
            f"{args.gpu_utilization:g}."
        )
    return cache_budget(
        shape,
        args.model_config,
        parse_bytes(args.gpu_memory),
        utilization=args.gpu_utilization,
        weights=None if args.weights is None else parse_bytes(args.weights),
        ranks=args.tensor_parallel,
    )
