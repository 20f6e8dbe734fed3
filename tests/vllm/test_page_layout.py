# SPDX-License-Identifier: Apache-2.0
"""Which attention backends get the layers of a page side by side, and which not."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheLayout

from hybrid_plugin.vllm import page_layout
from hybrid_plugin.vllm.activation import logger


class Backend:
    """What is asked of an attention backend."""

    def __init__(
        self,
        name: str,
        layouts: tuple[KVCacheLayout, ...] | None = None,
        sizes: tuple[int, ...] = (16,),
    ) -> None:
        self._name, self._layouts, self._sizes = name, layouts, sizes

    def get_name(self) -> str:
        return self._name

    def supported_kv_cache_layouts(self) -> tuple[KVCacheLayout, ...] | None:
        return self._layouts

    def get_supported_kernel_block_sizes(self, spec: Any = None) -> list[int]:
        return list(self._sizes)

    def supports_block_size(self, size: int | None) -> bool:
        return size is None or any(size % known == 0 for known in self._sizes)


def asked(
    monkeypatch: pytest.MonkeyPatch,
    *backends: Backend,
    elastic: bool = True,
    page_size: int = 16,
    flash_attention: int | None = 3,
) -> list[str]:
    """What a worker names with such backends."""
    monkeypatch.setattr(
        current_platform, "_find_non_ssm_backends", lambda config: backends
    )
    monkeypatch.setattr(page_layout.elastic, "is_wanted", lambda config: elastic)
    impl = SimpleNamespace(vllm_flash_attn_version=flash_attention)
    layers = {"a": SimpleNamespace(impl=impl), "s": SimpleNamespace()}
    config: Any = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=page_size),
        compilation_config=SimpleNamespace(static_forward_context=layers),
    )
    kinds: Any = backends
    layouts = page_layout.get_supported_kv_cache_layouts(kinds)
    return page_layout.supported(config, [layout.name for layout in layouts])


def test_what_vllm_settled_on_says_how_pages_lie() -> None:
    packed = []
    for layout in KVCacheLayout:
        cache: Any = SimpleNamespace(
            get_resolved_kv_cache_layout=lambda chosen=layout: chosen
        )
        if page_layout.is_packed(SimpleNamespace(cache_config=cache)):  # type: ignore[arg-type]
            packed.append(layout.name)
    assert packed == ["BLHNC", "BLNHC"], "in BHLNC a page of a layer is in pieces"


def test_kernels_that_ask_for_packed_pages_get_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    indexer = Backend("ANOTHER", (KVCacheLayout.BLHNC, KVCacheLayout.BLNHC))
    assert asked(monkeypatch, indexer) == ["BLHNC", "BLNHC"]


FLASH = Backend("FLASH_ATTN")
CPU = Backend("CPU_ATTN", (KVCacheLayout.LBHNC,))


@pytest.mark.parametrize(
    ("backends", "first"),
    [
        ((FLASH,), "BLNHC"),
        ((Backend("TRITON_ATTN"), FLASH), "BLNHC"),
        ((CPU,), "BLHNC"),
        (
            (
                Backend(
                    "FLASHINFER", (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC), (16, 32)
                ),
            ),
            "BLHNC",
        ),
    ],
)
def test_packed_pages_come_first(
    monkeypatch: pytest.MonkeyPatch, backends: tuple[Backend, ...], first: str
) -> None:
    names = asked(monkeypatch, *backends)
    assert names[0] == first and names.count(first) == 1
    assert names[1] == first.replace("BL", "LB"), "what vLLM would choose is next"
    assert asked(monkeypatch, *backends, elastic=False)[0] == names[1]


@pytest.mark.parametrize(
    ("backend", "page_size", "version", "reason"),
    [
        (Backend("TRITON_MLA"), 16, None, "TRITON_MLA are not known"),
        (Backend("FLASH_ATTN", (KVCacheLayout.LBNHC,)), 16, 3, "takes no BLNHC"),
        (Backend("FLASH_ATTN", (KVCacheLayout.LHBNC,)), 16, 3, "in several places"),
        (FLASH, 48, 2, "divides pages of 48 tokens into blocks of 16"),
        (FLASH, 16, 4, "FlashAttention 4 is not known"),
    ],
)
def test_others_keep_their_layout_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    backend: Backend,
    page_size: int,
    version: int | None,
    reason: str,
) -> None:
    monkeypatch.setattr(logger, "propagate", True)
    with caplog.at_level(logging.INFO, logger.name):
        names = asked(
            monkeypatch, backend, page_size=page_size, flash_attention=version
        )
    assert KVCacheLayout[names[0]].is_layer_compact
    (record,) = caplog.records
    assert reason in record.getMessage()
    assert "memory moves in larger granules" in record.getMessage()
