# SPDX-License-Identifier: Apache-2.0
"""vLLM's flags for KV in host memory, as configurations come out of them."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.config import KVTransferConfig

from hybrid_plugin.vllm.activation import conflicts, is_active, read_options
from tests.engines.drivers.driver import Setup
from tests.engines.drivers.vllm import VllmDriver
from tests.vllm.test_activation import config_of

GIB = 1 << 30
CONNECTORS = "vLLM's KV connectors do not know the plugin's pools"


def connector(name: str, role: str = "kv_both", **settings: Any) -> dict[str, Any]:
    """Arguments of an engine with one of vLLM's connectors."""
    given = KVTransferConfig(
        kv_connector=name, kv_role=role, kv_connector_extra_config=settings
    )
    return {"kv_transfer_config": given}


@pytest.mark.parametrize(
    ("arguments", "size"),
    [
        ({"kv_offloading_size": 1.5}, 3 * GIB // 2),
        (connector("OffloadingConnector", cpu_bytes_to_use=GIB), GIB),
        (connector("SimpleCPUOffloadConnector"), 8 * GIB),
        (connector("SimpleCPUOffloadConnector", cpu_bytes_to_use_per_rank=GIB), GIB),
        (
            connector(
                "OffloadingConnector",
                cpu_bytes_to_use=GIB,
                spec_name="CPUOffloadingSpec",
                blocks_per_chunk=4,
            ),
            GIB,
        ),
    ],
)
def test_its_size_becomes_that_of_host_memory(
    arguments: dict[str, Any], size: int
) -> None:
    config = config_of(**arguments)
    assert is_active(config)
    assert read_options(config).host_memory == size
    assert config.kv_transfer_config is None
    assert config.cache_config.kv_offloading_size is None


def test_all_ranks_share_it() -> None:
    config = config_of(kv_offloading_size=2, tensor_parallel_size=2)
    assert read_options(config).host_memory == GIB


def test_the_option_goes_before_the_flag() -> None:
    options = {"hybrid_plugin": {"host_memory": "1GiB"}}
    config = config_of(kv_offloading_size=2, additional_config=options)
    assert read_options(config).host_memory == GIB
    assert config.kv_transfer_config is None


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (connector("NixlConnector"), CONNECTORS),
        (
            connector("OffloadingConnector", "kv_producer", cpu_bytes_to_use=1),
            CONNECTORS,
        ),
        (
            connector("OffloadingConnector", cpu_bytes_to_use=1, spec_name="Tiering"),
            CONNECTORS,
        ),
        (
            connector("SimpleCPUOffloadConnector", kv_offload_backend="disk"),
            CONNECTORS,
        ),
        (
            {"kv_offloading_size": 1, "kv_offloading_backend": "lmcache"},
            "LMCache and other connectors do not know the plugin's pools",
        ),
        (
            connector("NixlConnector") | {"kv_offloading_size": 1},
            "LMCache and other connectors do not know the plugin's pools",
        ),
    ],
)
def test_what_goes_further_is_refused(arguments: dict[str, Any], sentence: str) -> None:
    config = config_of(additional_config={"hybrid_plugin": {"enabled": False}})
    cache, given = config.cache_config, arguments
    config.kv_transfer_config = given.get("kv_transfer_config")
    cache.kv_offloading_size = given.get("kv_offloading_size")
    cache.kv_offloading_backend = given.get("kv_offloading_backend", "native")
    assert next(conflicts(config)).startswith(sentence)


def test_ranks_that_schedule_for_themselves_keep_vllms_connector() -> None:
    config = config_of(
        kv_offloading_size=2,
        tensor_parallel_size=2,
        additional_config={"hybrid_plugin": {"enabled": False}},
    )
    config.kv_transfer_config, config.cache_config.kv_offloading_size = None, 2
    config.parallel_config.distributed_executor_backend = "external_launcher"
    sentence = next(conflicts(config))
    assert "one time for all ranks" in sentence
    assert sentence.endswith("drop --kv-offloading-size.")


def test_vllm_keeps_its_connector_where_the_plugin_is_off() -> None:
    config = config_of(
        kv_offloading_size=1, additional_config={"hybrid_plugin": {"enabled": False}}
    )
    assert config.kv_transfer_config.kv_connector == "OffloadingConnector"


def test_the_log_says_what_has_no_effect() -> None:
    settings = (
        '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", '
        '"kv_connector_extra_config": {"cpu_bytes_to_use": 1048576, "lazy": 1}}'
    )
    setup = Setup(flags=("--kv-transfer-config", settings))
    lines = VllmDriver().decide(setup).lines
    assert any("--kv-transfer-config says, states included" in line for line in lines)
    assert any("lazy is for vLLM's connector" in line for line in lines)
