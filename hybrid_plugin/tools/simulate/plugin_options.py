# SPDX-License-Identifier: Apache-2.0
"""The plugin's options, as an engine takes them, of which a simulation needs a few.

An option is honoured, or refused with the reason: none is ignored.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from hybrid_plugin.config import ConfigError, HybridConfig, parse_options
from hybrid_plugin.sizes import parse_size_or_multiple
from hybrid_plugin.tools.plan.shape import ModelShape

_HONOURED = frozenset(
    {
        "enabled",
        "page_size",
        "elastic",
        "gpu_memory_budget",
        "state_memory_ratio",
        "in_batch_prefix_min_tokens",
        "kernels",
        "deterministic",
        "host_memory",
    }
)
_REASONS = {
    "disk": "files behind host memory are not simulated",
    "draft_states": "drafts are simulated with a state each: --drafts",
    "eviction_policy": "--policy says what is evicted first",
    "models": "whose class runs a model changes nothing in the cache",
    "store": "a store that servers share is not simulated",
    "peers": "other servers are not simulated",
    "prefill_graphs": "it changes how long a pass takes, and nothing in the cache",
    "verify_fraction": "nothing is computed that could differ",
    "system_snapshot_min_tokens": "a trace does not tell where messages end",
}
_OF_MEMORY = ("elastic", "gpu_memory_budget", "state_memory_ratio", "host_memory")
"""Options that divide the memory of a model."""


def read_plugin_options(
    args: argparse.Namespace, shape: ModelShape | None
) -> HybridConfig:
    """The options that --hybrid-config and the flags for some of them amount to.

    Args:
        args: parsed.
        shape: of the model, if one is given.

    Raises:
        ConfigError: for an option that makes no sense, or that would change nothing.
    """
    given = _given(args.hybrid_config)
    options = HybridConfig.from_mapping(given)
    _check_honoured(given)
    for name in ("page_size", "elastic"):
        options = _with_flag(options, name, getattr(args, name))
    if args.host_memory is not None:
        size = parse_size_or_multiple(args.host_memory)
        options = _with_flag(options, "host_memory", size)
    _check_calibration(args, options)
    if args.gpu_memory is None:
        _check_without_memory(options)
    if options.state_memory_ratio is not None and (
        args.kv_only or shape is None or not shape.layout(1).slot_bytes
    ):
        raise ConfigError(
            "state_memory_ratio is a share for state slots, and without state layers "
            "there are none: leave it out."
        )
    return options


def _given(text: str | None) -> dict[str, Any]:
    return {} if text is None else parse_options(text, "--hybrid-config")


def _check_honoured(given: dict[str, Any]) -> None:
    """Refuse options that change nothing here."""
    if given.get("enabled") is False:
        raise ConfigError(
            "enabled is false: without the plugin there is nothing to simulate."
        )
    for name in given:
        if name not in _HONOURED:
            reason = _REASONS.get(name, "it changes nothing in a simulation")
            raise ConfigError(f"Leave the option {name} out: {reason}.")


def _with_flag(options: HybridConfig, name: str, value: object) -> HybridConfig:
    """The same with what a flag says."""
    if value is None:
        return options
    if getattr(options, name) not in (None, value):
        flag = "--" + name.replace("_", "-")
        raise ConfigError(
            f"{flag} and the option {name} of --hybrid-config contradict each other: "
            "give one of them."
        )
    return replace(options, **{name: value})  # type: ignore[arg-type]


def _check_calibration(args: argparse.Namespace, options: HybridConfig) -> None:
    """Refuse host memory where costs are fitted."""
    if options.host_memory is not None and args.calibrate is not None:
        raise ConfigError(
            "--calibrate fits what passes cost, and not what they wait for: leave "
            "--host-memory out."
        )


def _check_without_memory(options: HybridConfig) -> None:
    """Refuse options that divide memory where none is given."""
    for name in _OF_MEMORY:
        if getattr(options, name) not in (None, False):
            shown = "--elastic" if name == "elastic" else name
            raise ConfigError(
                f"{shown} needs --gpu-memory and --model-config, to know what there is "
                "to divide."
            )
