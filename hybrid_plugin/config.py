# SPDX-License-Identifier: Apache-2.0
"""HybridConfig: the only place where options are named, defaulted and checked."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from hybrid_plugin.core.policy.eviction import FlopAware, LeastRecentlyUsed, UsedFirst
from hybrid_plugin.core.policy.message_boundaries import Delimiters
from hybrid_plugin.core.policy.snapshot_positions import SnapshotPolicy

ENABLE_VARIABLE = "HYBRID_PLUGIN"
DEFAULT_PAGE_SIZE = 16


def _option(default: Any, help_text: str) -> Any:
    return field(default=default, metadata={"help": help_text})


class ConfigError(ValueError):
    """An option that cannot be served; the message says what to do about it."""


@dataclass(frozen=True, slots=True)
class HybridConfig:
    """Options of the plugin, equal for every engine.

    Raises:
        ConfigError: for a value out of range.
    """

    enabled: bool | None = _option(
        None,
        "false: leave the engine alone. true: refuse to start rather than step aside "
        "where the plugin cannot serve. By default it steps aside with a warning.",
    )
    page_size: int | None = _option(
        None,
        "Tokens in a KV page; by default 16, or the least the attention backend takes.",
    )
    elastic: bool | None = _option(
        None,
        "Whether memory moves between KV pages and state slots while the engine runs; "
        "by default wherever it can and no other option fixes the pools.",
    )
    gpu_memory_budget: int | None = _option(
        None,
        "Bytes that pages and slots may take together on each rank; by default all "
        "that the engine has for its cache.",
    )
    kv_pages_floor: int | None = _option(
        None, "KV pages that state slots never take the memory of, with elastic pools."
    )
    state_slots_floor: int | None = _option(
        None, "State slots that KV pages never take the memory of, with elastic pools."
    )
    state_memory_ratio: float | None = _option(
        None,
        "Share of the cache memory for state slots, between 0 and 1, without elastic "
        "pools; by default what serves the most sequences of a typical length.",
    )
    kv_pages: int | None = _option(
        None, "Exact number of KV pages, with state_slots, instead of a split."
    )
    state_slots: int | None = _option(
        None, "Exact number of state slots, with kv_pages, instead of a split."
    )
    branch_snapshot_min_tokens: int = _option(
        256,
        "A branch point gets a snapshot only if that can save so many tokens, or a "
        "quarter of those that are restored without it.",
    )
    prompt_snapshot_min_tokens: int = _option(
        1024,
        "The end of a prompt gets a snapshot, which costs a forward pass more, only "
        "if that can save so many tokens.",
    )
    prompt_body_share: float = _option(
        0.75,
        "Share of a long prompt after which it gets a snapshot by the same rule, for "
        "prompts that share its beginning; 0 for none.",
    )
    chunk_snapshot_min_tokens: int = _option(
        1024,
        "The end of a chunk of a long prompt gets a snapshot only if that can save so "
        "many tokens.",
    )
    system_snapshot_min_tokens: int | None = _option(
        None,
        "The end of a system message, told by the tokenizer's own chat template, gets "
        "a snapshot if that can save so many tokens: already the second chat with it "
        "hits. By default the third does.",
    )
    in_batch_prefix_min_tokens: int = _option(
        256,
        "A request waits for another one that computes just now what both begin with, "
        "if that saves so many tokens; 0 for never.",
    )
    max_snapshots_per_path: int | None = _option(
        None,
        "Snapshots on the way to a new one, itself included; beyond that the one worth "
        "least of them goes. By default any number.",
    )
    eviction_policy: str = _option(
        "used-first",
        "What is evicted first: `used-first` what nobody resumed from yet, `lru` what "
        "was used least recently, `flop-aware` the same weighed with the tokens that a "
        "snapshot saves per byte, `flop-aware-tuned` with a weight that is found by "
        "replay, at the cost of host time.",
    )

    def __post_init__(self) -> None:
        ratio = self.state_memory_ratio
        if ratio is not None and not 0 < ratio < 1:
            raise ConfigError(
                f"state_memory_ratio must lie between 0 and 1, both excluded, got "
                f"{ratio}; leave it out for an automatic split."
            )
        if (self.kv_pages is None) != (self.state_slots is None):
            raise ConfigError(
                "kv_pages and state_slots fix both pools together: give both or none."
            )
        fixed = next((n for n in _FIXED if getattr(self, n) is not None), None)
        if self.elastic and fixed is not None:
            raise ConfigError(
                f"{fixed} fixes the pools, and elastic pools move: set elastic to "
                f"false, or leave {fixed} out."
            )
        floor = next((n for n in _FLOORS if getattr(self, n) is not None), None)
        if not self.is_elastic and floor is not None:
            raise ConfigError(
                f"{floor} is for elastic pools: leave it out, or set elastic to true."
            )
        if self.kv_pages is not None and ratio is not None:
            raise ConfigError(
                "state_memory_ratio splits the memory that kv_pages and state_slots "
                "fix already: give one or the other."
            )
        if not 0 <= self.prompt_body_share < 1:
            raise ConfigError(
                f"prompt_body_share must be at least 0 and less than 1, got "
                f"{self.prompt_body_share}."
            )
        if self.eviction_policy not in _POLICIES:
            raise ConfigError(
                f"eviction_policy must be one of {', '.join(_POLICIES)}, got "
                f"{self.eviction_policy!r:.40}."
            )
        if self.is_tuned and self.elastic:
            raise ConfigError(
                "flop-aware-tuned replays through copies of pools of fixed size: set "
                "elastic to false, or take flop-aware."
            )
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} must be at least {least}, got {value}.")

    @property
    def is_tuned(self) -> bool:
        """Whether the weight of the eviction policy is found by replay."""
        return self.eviction_policy == _TUNED

    @property
    def is_elastic(self) -> bool:
        """Whether memory moves between the pools, as far as the options say."""
        if self.elastic is not None:
            return self.elastic
        fixed = any(getattr(self, name) is not None for name in _FIXED)
        return not fixed and not self.is_tuned

    def snapshot_policy(
        self, page_size: int, delimiters: Delimiters | None = None
    ) -> SnapshotPolicy:
        """The policy these options describe.

        Args:
            page_size: tokens in a page.
            delimiters: what ends a message, if the options want to know.
        """
        return SnapshotPolicy(
            page_size=page_size,
            branch_min_tokens=self.branch_snapshot_min_tokens,
            prompt_end_min_tokens=self.prompt_snapshot_min_tokens,
            chunk_end_min_tokens=self.chunk_snapshot_min_tokens,
            body_share=self.prompt_body_share,
            in_batch_prefix_min_tokens=self.in_batch_prefix_min_tokens,
            max_per_path=self.max_snapshots_per_path,
            delimiters=delimiters,
            system_min_tokens=self.system_snapshot_min_tokens or 1,
        )

    def eviction(self, *, token_bytes: float, slot_bytes: float) -> LeastRecentlyUsed:
        """The eviction policy these options name.

        Args:
            token_bytes: KV of a token.
            slot_bytes: states of a sequence.
        """
        if self.eviction_policy in ("flop-aware", _TUNED):
            return FlopAware(float, token_bytes=token_bytes, slot_bytes=slot_bytes)
        return (
            UsedFirst()
            if self.eviction_policy == "used-first"
            else (LeastRecentlyUsed())
        )

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> HybridConfig:
        """Build from parsed JSON.

        Raises:
            ConfigError: for an unknown name, a wrong type or a bad value.
        """
        known = {f.name: f for f in fields(cls)}
        for name, value in options.items():
            if name not in known:
                raise ConfigError(
                    f"Unknown hybrid_plugin option {name!r}; known are: "
                    f"{', '.join(sorted(known))}."
                )
            _check_type(name, value, str(known[name].type))
        return cls(**options)


_FIXED = ("state_memory_ratio", "kv_pages", "state_slots")
_FLOORS = ("kv_pages_floor", "state_slots_floor")
_LEAST = {
    "page_size": 1,
    "gpu_memory_budget": 1,
    "kv_pages_floor": 1,
    "state_slots_floor": 1,
    "kv_pages": 2,
    "state_slots": 2,
    "branch_snapshot_min_tokens": 1,
    "prompt_snapshot_min_tokens": 1,
    "chunk_snapshot_min_tokens": 1,
    "system_snapshot_min_tokens": 1,
    "in_batch_prefix_min_tokens": 0,
    "max_snapshots_per_path": 1,
}
_TUNED = "flop-aware-tuned"
_POLICIES = ("used-first", "lru", "flop-aware", _TUNED)


def _check_type(name: str, value: Any, annotation: str) -> None:
    wanted = annotation.removesuffix(" | None")
    if value is None and annotation != wanted:
        return
    accepted: dict[str, tuple[type, ...]] = {
        "bool": (bool,),
        "int": (int,),
        "float": (int, float),
        "str": (str,),
    }
    is_bool = isinstance(value, bool)
    if not isinstance(value, accepted[wanted]) or (is_bool and wanted != "bool"):
        raise ConfigError(
            f"hybrid_plugin option {name!r} takes {wanted}, got {value!r}."
        )


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
    """The options as Markdown, for the README."""
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for option in fields(HybridConfig):
        default = "" if option.default is None else f"`{option.default}`"
        rows.append(f"| `{option.name}` | {default} | {option.metadata['help']} |")
    return "\n".join(rows)
