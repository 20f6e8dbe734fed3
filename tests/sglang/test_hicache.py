# SPDX-License-Identifier: Apache-2.0
"""SGLang's flags for a hierarchical cache, as its arguments come out of them."""

from __future__ import annotations

import pytest

pytest.importorskip("sglang")

from hybrid_plugin.sglang import activation, arguments
from hybrid_plugin.sizes import Multiple
from tests.engines.drivers.driver import Setup
from tests.engines.drivers.sglang import SglangDriver

DRIVER = SglangDriver()
HIERARCHICAL = "--enable-hierarchical-cache"


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The host memory of each server that was configured, by its environment."""
    found: list[object] = []
    settle = arguments.settle

    def watched(server_args: object, options: object) -> None:
        settle(server_args, options)  # type: ignore[arg-type]
        found.append(activation.read_options().host_memory)

    monkeypatch.setattr(arguments, "settle", watched)
    return found


@pytest.mark.parametrize(
    ("flags", "size"),
    [
        (("--hicache-size=1",), 10**9),
        (("--hicache-ratio=0.7",), Multiple(0.7)),
        ((), Multiple(2.0)),
        (("--hicache-write-policy=write_back", "--hicache-size=1"), 10**9),
    ],
)
def test_its_size_becomes_that_of_host_memory(
    settled: list[object], flags: tuple[str, ...], size: object
) -> None:
    decision = DRIVER.decide(Setup(flags=(HIERARCHICAL, *flags)))
    assert decision.refusal is None and decision.active
    assert settled == [size]
    assert any("says, states included" in line for line in decision.lines)


def test_sglang_has_no_such_cache_then(settled: list[object]) -> None:
    decision = DRIVER.decide(Setup(flags=(HIERARCHICAL,)))
    assert decision.settings["enable_hierarchical_cache"] is False


def test_the_option_goes_before_the_flags(settled: list[object]) -> None:
    setup = Setup(options={"host_memory": 1 << 20}, flags=(HIERARCHICAL,))
    decision = DRIVER.decide(setup)
    assert settled == [1 << 20]
    assert any("goes before" in line for line in decision.lines)


def test_what_lies_behind_it_is_refused() -> None:
    flags = (HIERARCHICAL, "--hicache-storage-backend=file")
    refusal = DRIVER.decide(Setup(flags=flags)).refusal
    assert refusal is not None and "--hicache-storage-backend is for" in refusal
