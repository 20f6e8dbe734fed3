# SPDX-License-Identifier: Apache-2.0
"""HybridConfig: the only place where options are named, defaulted and checked."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from hybrid_plugin.core.policy.costs import PASS_TOKENS, SHARED_TOKENS
from hybrid_plugin.core.policy.message_boundaries import Delimiters
from hybrid_plugin.core.policy.snapshot_positions import SnapshotPolicy
from hybrid_plugin.disk_options import DiskOptions as DiskOptions
from hybrid_plugin.errors import ConfigError as ConfigError
from hybrid_plugin.peer_options import PeerOptions as PeerOptions
from hybrid_plugin.sizes import Multiple, parse_bytes, parse_size_or_multiple
from hybrid_plugin.store_options import StoreOptions as StoreOptions

ENABLE_VARIABLE = "HYBRID_PLUGIN"
OPTIONS_VARIABLE = "HYBRID_CONFIG"
DEFAULT_PAGE_SIZE = 16
KERNELS = ("auto", "ours", "engine")
DETERMINISTIC = ("off", "prefix")
DRAFT_STATES = ("auto", "columns", "replay")
"""What the options of these names may be."""


def _option(default: Any, help_text: str) -> Any:
    return field(default=default, metadata={"help": help_text})


@dataclass(frozen=True, slots=True)
class HybridConfig:
    """Options of the plugin, equal for every engine.

    Raises:
        ConfigError: for a value out of range.
    """

    enabled: bool | None = _option(
        None,
        "false: leave the engine alone. true: refuse to start rather than step aside "
        "where the plugin cannot serve, and in vLLM also serve models that have "
        "attention windows but no state layers. By default vLLM steps aside with a "
        "warning; SGLang, where a flag asks for the plugin, refuses.",
    )
    page_size: int | None = _option(
        None,
        "Tokens in a KV page; by default 16, or the nearest size that the attention "
        "backend and the prefill chunks take.",
    )
    elastic: bool | None = _option(
        None,
        "Whether memory moves between KV pages and state slots while the engine runs; "
        "by default wherever it can and no other option fixes the pools.",
    )
    gpu_memory_budget: int | None = _option(
        None,
        "Memory that pages and slots may take together on each rank: bytes, or a size "
        'such as `"40GiB"`; by default all that the engine has for its cache.',
    )
    host_memory: int | Multiple | None = _option(  # noqa: RUF009 - a field, as the others
        None,
        "Pinned host memory of each rank in which cached content is kept when the "
        'device evicts it: bytes, a size such as `"64GiB"`, or a multiple of the '
        'device\'s cache memory such as `"2x"`, lowered to what the machine has free; '
        "by default none, or as much as the engine's own flags for this say.",
    )
    disk: DiskOptions | None = _option(  # noqa: RUF009 - likewise
        None,
        "Files behind `host_memory`, which it needs, in which cached content outlives "
        'the server: `{"path": "/var/cache/hybrid", "size": "100GiB"}`, where `size` '
        "is for all ranks on this machine together, and `weights` may name the model's "
        "weights; by default none.",
    )
    peers: PeerOptions | None = _option(  # noqa: RUF009 - a field, as the others
        None,
        "Other servers of the same model that read from `host_memory`, which it needs, "
        'and from which this one reads: `{"listen": "127.0.0.1:7600"}`; for other '
        'addresses also `"secret_file": "/etc/hybrid/secret"`, and `weights` may name '
        "the model's weights; by default none.",
    )
    store: StoreOptions | None = _option(  # noqa: RUF009 - a field, as the others
        None,
        "A Mooncake Store behind `host_memory`, which it needs, in which servers of "
        'the same model share what they cache: `{"master": "10.0.0.5:50051", '
        '"address": "10.0.0.7", "size": "64GiB"}`, where `address` is that of this '
        "machine, `size` is what each rank lends to the store, and `metadata` and "
        "`weights` may be given; by default none.",
    )
    state_memory_ratio: float | None = _option(
        None,
        "Share of the cache memory for state slots, between 0 and 1, without elastic "
        "pools; by default what serves the most sequences of a typical length.",
    )
    system_snapshot_min_tokens: int | None = _option(
        None,
        "The end of a system message, found by the chat template, gets a snapshot if "
        "that saves at least this many tokens, so that the second chat with the same "
        "system message hits. By default the third does.",
    )
    in_batch_prefix_min_tokens: int | None = _option(
        None,
        "A request waits for another one that is computing the prefix that both "
        "share, if that saves at least this many tokens; 0 for never. By default 256, "
        "and 64 on a CPU, where a forward pass of few tokens costs less.",
    )
    kernels: str = _option(
        "auto",
        "Whose kernels run the state layers: `ours`, `engine`, or `auto`, which takes "
        "ours where they were measured to serve as fast. With ours, a prompt is not "
        "paused for snapshots.",
    )
    deterministic: str = _option(
        "off",
        "`prefix`: answers and their log probabilities have the same bits alone and "
        "in a crowd, cold and from the cache, however prompts are split. It needs our "
        "kernels in all state layers and the engine's own batch-invariant mode.",
    )
    prefill_graphs: bool | None = _option(
        None,
        "Short prefills replay CUDA graphs that hold our kernels; what does not fit a "
        "graph runs as without. It needs our kernels in the prefill of all state "
        "layers. By default where the engine can capture them and where it was "
        "measured on a GPU, with the same answers.",
    )

    draft_states: str = _option(
        "auto",
        "How states of unverified drafts are kept: `columns`, a state after each "
        "draft; `replay`, one state and a small record of each draft, on our kernels; "
        "or `auto`, which takes `replay` where it was measured to serve as fast, with "
        "the same answers: on Hopper, for gated delta nets and Mamba-2.",
    )
    verify_fraction: float = _option(
        0.0,
        "Share of the requests with a hit, between 0 and 1, that are served again when "
        "nothing else runs, with the hit and without. If log probabilities differ by "
        "more than rounding, the log says so, and "
        "`hybrid_cache_hit_checks_failed_total` counts it.",
    )
    models: tuple[str, ...] = _option(
        (),
        'Architectures, such as `["JambaForCausalLM"]`, that our model classes serve '
        "although the engine has one. What the engine lacks is always served by ours.",
    )

    def __post_init__(self) -> None:
        ratio = self.state_memory_ratio
        if ratio is not None and not 0 < ratio < 1:
            raise ConfigError(
                f"state_memory_ratio must lie between 0 and 1, both excluded, got "
                f"{ratio}; leave it out for an automatic split."
            )
        if self.elastic and ratio is not None:
            raise ConfigError(
                "state_memory_ratio fixes the pools, and elastic pools move: set "
                "elastic to false, or leave state_memory_ratio out."
            )
        if not 0 <= self.verify_fraction <= 1:
            raise ConfigError(
                f"verify_fraction must lie between 0 and 1, got {self.verify_fraction}."
            )
        if self.kernels not in KERNELS:
            raise ConfigError(
                f"kernels must be {', '.join(KERNELS)}, got {self.kernels!r}."
            )
        if self.deterministic not in DETERMINISTIC:
            raise ConfigError(
                f"deterministic must be {' or '.join(DETERMINISTIC)}, got "
                f"{self.deterministic!r}."
            )
        if self.draft_states not in DRAFT_STATES:
            raise ConfigError(
                f"draft_states must be {', '.join(DRAFT_STATES)}, got "
                f"{self.draft_states!r}."
            )
        if self.draft_states == "replay" and self.kernels == "engine":
            raise ConfigError(
                "draft_states is replay, which needs our kernels, and kernels is "
                "engine: leave one of them out."
            )
        if self.is_deterministic and self.elastic:
            raise ConfigError(
                "deterministic lets nobody be preempted, and elastic pools cannot "
                "promise that what is reserved can be mapped: leave one of them out."
            )
        if self.is_deterministic and self.host_memory is not None:
            raise ConfigError(
                "deterministic was not tested with host_memory: leave one of them out."
            )
        if self.disk is not None and self.host_memory is None:
            raise ConfigError(
                "disk needs host_memory, through which content goes to files and back: "
                "give both, or leave disk out."
            )
        if self.peers is not None and self.host_memory is None:
            raise ConfigError(
                "peers needs host_memory, from which peers read: give both, or leave "
                "peers out."
            )
        if self.store is not None and self.host_memory is None:
            raise ConfigError(
                "store needs host_memory, through which content goes to the store and "
                "back: give both, or leave store out."
            )
        if self.store is not None and self.disk is not None:
            raise ConfigError(
                "store and disk would both keep what is cached: leave one of them out."
            )
        if self.is_deterministic and self.kernels == "engine":
            raise ConfigError(
                "deterministic needs our kernels, and kernels is engine: leave one of "
                "them out."
            )
        if self.prefill_graphs:
            self._check_prefill_graphs()
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if isinstance(value, int) and value < least:
                raise ConfigError(f"{name} must be at least {least}, got {value}.")

    def _check_prefill_graphs(self) -> None:
        if self.is_deterministic:
            raise ConfigError(
                "deterministic is not promised with prefill_graphs: leave one of them "
                "out."
            )
        if self.kernels == "engine":
            raise ConfigError(
                "prefill_graphs needs our kernels, and kernels is engine: leave one of "
                "them out."
            )

    @property
    def is_elastic(self) -> bool:
        """Whether memory moves between the pools, as far as the options say."""
        if self.elastic is not None:
            return self.elastic
        if self.is_deterministic:
            return False
        return self.state_memory_ratio is None

    @property
    def has_outer_tiers(self) -> bool:
        """Whether there is something behind the host memory."""
        return any(self.outer_options)

    @property
    def outer_options(self) -> tuple[DiskOptions | PeerOptions | StoreOptions, ...]:
        """What is behind the host memory, as the options say it."""
        given = (self.disk, self.peers, self.store)
        return tuple(one for one in given if one is not None)

    @property
    def is_deterministic(self) -> bool:
        """Whether the cache may hold canonical content only."""
        return self.deterministic != "off"

    @property
    def wants_prefill_graphs(self) -> bool | None:
        """Whether short prefills are to replay graphs; None if they may."""
        return False if self.is_deterministic else self.prefill_graphs

    @property
    def wanted_kernels(self) -> str:
        """One of `KERNELS`: what `kernels` and `deterministic` together ask for."""
        return "ours" if self.is_deterministic else self.kernels

    def snapshot_policy(
        self,
        page_size: int,
        delimiters: Delimiters | None = None,
        pass_tokens: int = PASS_TOKENS,
    ) -> SnapshotPolicy:
        """The policy these options describe.

        Args:
            page_size: tokens in a page.
            delimiters: what ends a message, if the options want to know.
            pass_tokens: what a forward pass costs; see `core/policy/costs.py`.
        """
        fewest = self.in_batch_prefix_min_tokens
        return SnapshotPolicy(
            page_size=page_size,
            in_batch_prefix_min_tokens=min(pass_tokens, SHARED_TOKENS)
            if fewest is None
            else fewest,
            delimiters=delimiters,
            system_min_tokens=self.system_snapshot_min_tokens or 1,
        )

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> HybridConfig:
        """Build from parsed JSON.

        Raises:
            ConfigError: for an unknown or removed name, a wrong type or a bad value.
        """
        known = {f.name: f for f in fields(cls)}
        values = {}
        for name, value in options.items():
            if name in _REMOVED:
                raise ConfigError(
                    f"hybrid_plugin option {name!r} was removed: {_REMOVED[name]}."
                )
            if name not in known:
                raise ConfigError(
                    f"Unknown hybrid_plugin option {name!r}; known are: "
                    f"{', '.join(sorted(known))}."
                )
            values[name] = _read_value(name, value)
            _check_type(name, values[name], str(known[name].type))
        return cls(**values)


_LEAST = {
    "page_size": 1,
    "gpu_memory_budget": 1,
    "host_memory": 1,
    "system_snapshot_min_tokens": 1,
    "in_batch_prefix_min_tokens": 0,
}
_SIZES = {"gpu_memory_budget": parse_bytes, "host_memory": parse_size_or_multiple}
"""Options in bytes, and what reads the texts that they take as well."""
_SAID = dict.fromkeys(_SIZES, "a size such as 40GiB") | {
    "host_memory": "a size such as 64GiB, or a multiple such as 2x",
    "models": "a list of names of architectures",
}
"""What options take, where their type does not say it."""
_FIXED_POOLS = (
    "bound both pools together with gpu_memory_budget, and split them with "
    "state_memory_ratio"
)
_FLOORS = "elastic pools need no floors; leave it out, or set elastic to false"
_LEARNED = (
    "leave it out; the cache learns from the traffic which snapshots repay their cost. "
    "Ask for others with a request's `hybrid_keep`"
)
_REMOVED = {
    "kv_pages": _FIXED_POOLS,
    "state_slots": _FIXED_POOLS,
    "kv_pages_floor": _FLOORS,
    "state_slots_floor": _FLOORS,
    "eviction_policy": (
        "the cache learns what is reused; `hybrid-plugin simulate --policy lru` "
        "compares"
    ),
    "max_snapshots_per_path": "leave it out; what is worth least is evicted first",
    "branch_snapshot_min_tokens": _LEARNED,
    "prompt_snapshot_min_tokens": _LEARNED,
    "chunk_snapshot_min_tokens": (
        "the plugin uses a constant; leave it out, and ask for the snapshots that you "
        "want with a request's `hybrid_keep`"
    ),
    "prompt_body_share": _LEARNED,
    "follow_min_tokens": "its name is in_batch_prefix_min_tokens now",
}
"""Options of earlier versions, and what to use instead."""


def _read_value(name: str, value: Any) -> Any:
    """What an option's JSON stands for; its type is not checked yet."""
    if name == "disk" and value is not None:
        return DiskOptions.from_value(value)
    if name == "models" and isinstance(value, list):
        return tuple(value)
    if name == "peers" and value is not None:
        return PeerOptions.from_value(value)
    if name == "store" and value is not None:
        return StoreOptions.from_value(value)
    return _read_size(name, value) if name in _SIZES else value


def _read_size(name: str, value: Any) -> Any:
    """Bytes, of a size with a unit; anything but a string is left as it is."""
    if not isinstance(value, str):
        return value
    try:
        return _SIZES[name](value)
    except ConfigError as error:
        raise ConfigError(f"hybrid_plugin option {name!r}: {error}") from error


def _check_type(name: str, value: Any, annotation: str) -> None:
    wanted = annotation.removesuffix(" | None")
    if value is None and annotation != wanted:
        return
    accepted: dict[str, tuple[type, ...]] = {
        "bool": (bool,),
        "int": (int,),
        "int | Multiple": (int, Multiple),
        "float": (int, float),
        "str": (str,),
        "DiskOptions": (DiskOptions,),
        "tuple[str, ...]": (tuple,),
        "PeerOptions": (PeerOptions,),
        "StoreOptions": (StoreOptions,),
    }
    is_bool = isinstance(value, bool)
    fits = isinstance(value, accepted[wanted]) and (not is_bool or wanted == "bool")
    if name == "models":
        fits = fits and all(isinstance(item, str) for item in value)
    if not fits:
        said = _SAID.get(name, wanted)
        raise ConfigError(f"hybrid_plugin option {name!r} takes {said}, got {value!r}.")


def parse_options(text: str, source: str) -> dict[str, Any]:
    """Parse a JSON object of options; their names and values are not checked yet.

    Args:
        text: the JSON.
        source: where it was written, for the message.

    Raises:
        ConfigError: for anything but a JSON object.
    """
    try:
        options = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source} takes JSON: {error}.") from error
    if not isinstance(options, dict):
        raise ConfigError(f"{source} takes a JSON object of options, got {text!r:.60}.")
    return options


def environment_options() -> dict[str, Any]:
    """The options in the environment variable HYBRID_CONFIG; none without it.

    Raises:
        ConfigError: for anything but a JSON object.
    """
    text = os.environ.get(OPTIONS_VARIABLE, "").strip()
    return parse_options(text, OPTIONS_VARIABLE) if text else {}


def switched_off_by_environment() -> bool:
    """Whether the environment variable HYBRID_PLUGIN says no.

    Raises:
        ConfigError: if it says neither yes nor no.
    """
    value = os.environ.get(ENABLE_VARIABLE, "1").strip().lower()
    if value in {"0", "false", "off", "no"}:
        return True
    if value in {"", "1", "true", "on", "yes"}:
        return False
    raise ConfigError(f"{ENABLE_VARIABLE} must be 0 or 1, got {value!r}.")


def options_table() -> str:
    """The options as Markdown, for docs/options.md."""
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for option in fields(HybridConfig):
        default = "" if option.default in (None, ()) else f"`{option.default}`"
        rows.append(f"| `{option.name}` | {default} | {option.metadata['help']} |")
    return "\n".join(rows)
