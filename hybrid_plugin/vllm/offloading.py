# SPDX-License-Identifier: Apache-2.0
"""vLLM's flags for KV in host memory: they size the plugin's `host_memory`.

A command that was written for vLLM's own offloading keeps its flags.  vLLM's connectors
know one pool of blocks; what the device evicts goes to the same amount of host memory
by the plugin's tier instead, states included.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hybrid_plugin.vllm.ranks import schedule_for_themselves

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_SIZE = "cpu_bytes_to_use"
_SIZE_OF_RANK = "cpu_bytes_to_use_per_rank"
_UNSAID = 8 << 30
"""Bytes that `SimpleCPUOffloadConnector` takes where nobody says how many."""
_PLAIN: dict[str, dict[str, Any]] = {
    "OffloadingConnector": {"spec_name": "CPUOffloadingSpec"},
    "SimpleCPUOffloadConnector": {"kv_offload_backend": "cpu"},
}
"""Connectors to host memory, and the settings that have them go no further."""


@dataclass(frozen=True, slots=True)
class Offloading:
    """Host memory that vLLM's flags ask for."""

    flag: str
    rank_bytes: int
    """For each rank."""
    idle: tuple[str, ...] = ()
    """Settings beside it, which are for vLLM's connector alone."""

    def describe(self, host_memory: object) -> Iterator[str]:
        """What becomes of the flag, for the log.

        Args:
            host_memory: the option of that name, which goes before the flag.
        """
        if host_memory != self.rank_bytes:
            yield f"hybrid-plugin: the option host_memory goes before {self.flag}."
        else:
            yield (
                "hybrid-plugin keeps what the device evicts in host memory itself, as "
                f"much as {self.flag} says, states included."
            )
        for setting in self.idle:
            yield (
                f"hybrid-plugin: of {self.flag}, {setting} is for vLLM's connector and "
                "has no effect."
            )


def wanted(vllm_config: VllmConfig) -> Offloading | None:
    """The host memory that an engine is to have by vLLM's flags; None for none.

    Also None where they ask for more than that: such connectors are refused.

    Args:
        vllm_config: before vLLM has derived a connector from the flags.
    """
    cache, given = vllm_config.cache_config, vllm_config.kv_transfer_config
    if not isinstance(vllm_config.additional_config, dict):
        return None  # nowhere to write the size down
    if cache.kv_offloading_size is not None:
        if given is not None or cache.kv_offloading_backend != "native":
            return None
        size = int(cache.kv_offloading_size * (1 << 30))
        return Offloading("--kv-offloading-size", size // _ranks(vllm_config))
    if given is None or given.kv_role != "kv_both":
        return None
    plain = _PLAIN.get(given.kv_connector or "")
    settings = given.kv_connector_extra_config or {}
    if plain is None or any(settings.get(k, v) != v for k, v in plain.items()):
        return None
    size = int(settings.get(_SIZE, _UNSAID)) // _ranks(vllm_config)
    size = int(settings.get(_SIZE_OF_RANK, size))
    idle = settings.keys() - plain.keys() - {_SIZE, _SIZE_OF_RANK}
    return Offloading("--kv-transfer-config", size, tuple(sorted(idle)))


def _ranks(vllm_config: VllmConfig) -> int:
    """Of one engine: vLLM's sizes are for all of them together."""
    return int(vllm_config.parallel_config.world_size)


def obstacle(vllm_config: VllmConfig) -> str | None:
    """A sentence about a connector that the plugin does not stand in for."""
    offloaded = wanted(vllm_config)
    if offloaded is not None:
        return (
            _without_one_time(offloaded)
            if schedule_for_themselves(vllm_config)
            else None
        )
    if vllm_config.cache_config.kv_offloading_size is not None:
        return (
            "LMCache and other connectors do not know the plugin's pools; drop "
            "--kv-offloading-backend and --kv-transfer-config."
        )
    if vllm_config.kv_transfer_config is not None:
        return (
            "vLLM's KV connectors do not know the plugin's pools; drop "
            "--kv-transfer-config, and for prefill and decode servers give the option "
            "peers."
        )
    return None


def _without_one_time(offloaded: Offloading) -> str:
    return (
        "host memory needs one time for all ranks, and those of an external launcher "
        f"schedule for themselves; drop {offloaded.flag}."
    )


def take_over(vllm_config: VllmConfig) -> None:
    """Leave vLLM without a connector: the options say how large the host memory is."""
    vllm_config.cache_config.kv_offloading_size = None
    vllm_config.kv_transfer_config = None
