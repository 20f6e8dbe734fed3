# SPDX-License-Identifier: Apache-2.0
"""The table of kernels that are as fast as the engines', from made-up measurements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import kernel_table
from benchmarks.kernel_speed.verdict import as_fast, as_python, compared, worst
from hybrid_plugin.engine import kernel_choice
from hybrid_plugin.engine.kernel_choice import (
    EVERY,
    FLASHINFER,
    TRITON,
    Mixer,
    Phase,
)

RULE, CONV = "gated_delta_rule.prefill", "causal_conv1d.prefill"


def rows(op: str, size: str, shape: str = "model", **times: float) -> list[Any]:
    """What was measured of an operation at one size."""
    return [
        {
            "op": op,
            "shape": shape,
            "size": size,
            "library": name.replace("_", " ") if "(" in name else name,
            "microseconds": microseconds,
        }
        for name, microseconds in times.items()
    ]


def delta(rule: float, conv: float, **more: float) -> list[Any]:
    """Prefills of a layer: ours as given, vLLM's 100 and 20."""
    return [
        *rows(RULE, "1 x 64", hybrid_kernels=rule, vllm=100, **more),
        *rows(CONV, "1 x 64", "D=8192", hybrid_kernels=conv, vllm=20),
    ]


def test_a_layer_is_the_sum_of_its_operations() -> None:
    found = [
        one for one in compared(delta(90, 25)) if one.mixer is not Mixer.SHORT_CONV
    ]
    (one,) = found
    assert (one.mixer, one.phase) == (Mixer.GATED_DELTA_NET, Phase.PREFILL)
    assert (one.ours, one.theirs, one.engine) == (115, 120, "vLLM")
    assert one.library == TRITON
    assert one.shape == "model" and one.kernels == ("vllm", "vllm")


def test_a_slow_convolution_counts_for_itself_too() -> None:
    table = as_fast(compared(delta(90, 25)), 1.0)
    assert table == {Mixer.GATED_DELTA_NET: {Phase.PREFILL: {TRITON: EVERY}}}
    assert as_fast(compared(delta(90, 20)), 1.0)[Mixer.SHORT_CONV] == {
        Phase.PREFILL: {TRITON: EVERY}
    }


def test_a_library_that_is_faster_stays_an_engines_choice() -> None:
    found = list(compared(delta(90, 20, flashinfer=60)))
    rules = [one for one in found if one.mixer is Mixer.GATED_DELTA_NET]
    assert [(one.library, one.kernels, one.theirs) for one in rules] == [
        (TRITON, ("vllm", "vllm"), 120),
        ("flashinfer", ("flashinfer", "vllm"), 80),
    ]
    prefill = {least: as_fast(found, least) for least in (1.0, 0.7)}
    assert prefill[1.0][Mixer.GATED_DELTA_NET] == {Phase.PREFILL: {TRITON: EVERY}}
    assert prefill[0.7][Mixer.GATED_DELTA_NET] == {
        Phase.PREFILL: {TRITON: EVERY, FLASHINFER: EVERY}
    }


def test_a_slow_size_keeps_longer_prefills_out() -> None:
    more = [
        *rows(RULE, "8 x 64", hybrid_kernels=200, vllm=100),
        *rows(CONV, "8 x 64", "D=8192", hybrid_kernels=20, vllm=20),
    ]
    found = list(compared([*delta(90, 20), *more]))
    assert as_fast(found, 1.0)[Mixer.GATED_DELTA_NET] == {Phase.PREFILL: {TRITON: 64}}
    found = list(compared([*delta(110, 20), *more]))
    assert Mixer.GATED_DELTA_NET not in as_fast(found, 1.0)
    slow = worst(found)[Mixer.GATED_DELTA_NET, Phase.PREFILL, TRITON]
    assert slow.size == "8 x 64" and slow.ratio == pytest.approx(120 / 220)


def test_what_was_not_measured_in_full_says_nothing() -> None:
    def mixers(found: list[Any]) -> set[Mixer]:
        return {one.mixer for one in compared(found)}

    without_ours, conv = delta(1, 1)[1:], delta(1, 1)[2:]
    only_fla = rows(RULE, "1 x 64", hybrid_kernels=1, fla=9)
    without_conv = rows(RULE, "1 x 64", hybrid_kernels=1, vllm=9)
    assert mixers(without_ours) == mixers([*only_fla, *conv]) == {Mixer.SHORT_CONV}
    assert mixers(without_conv) == set()


def test_one_slow_size_keeps_a_decode_out() -> None:
    op = "gated_delta_rule.update, gates fused"
    conv = "causal_conv1d.update"
    measured = [
        *rows(op, "1", hybrid_kernels=5, vllm=9),
        *rows(conv, "1", "D=8192", hybrid_kernels=1, vllm=1),
        *rows(op, "32", hybrid_kernels=9, vllm=5),
        *rows(conv, "32", "D=8192", hybrid_kernels=1, vllm=1),
    ]
    assert Mixer.GATED_DELTA_NET not in as_fast(compared(measured), 1.0)
    assert Mixer.GATED_DELTA_NET in as_fast(compared(measured[:4]), 1.0)


def test_the_python_is_the_table() -> None:
    table = {
        Mixer.KDA: {Phase.DECODE: {TRITON: EVERY}},
        Mixer.MAMBA2: {
            Phase.PREFILL: {FLASHINFER: 128},
            Phase.DECODE: {TRITON: EVERY, "x": 3},
        },
    }
    scope = dict(vars(kernel_choice))
    exec(as_python(table), scope)
    assert scope["AS_FAST"] == table


def test_results_become_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "kernels.json"
    document = {"versions": {"device": "a GPU"}, "rows": delta(90, 25)}
    path.write_text(json.dumps(document))
    assert kernel_table.main([str(path)]) == 0
    text = capsys.readouterr().out
    assert "a GPU" in text
    assert "| gated_delta_net | prefill | vLLM | 1 | 0 | 1.04 | model, 1 x 64 |" in text
    assert "        Phase.PREFILL: {TRITON: EVERY},\n" in text


def test_the_committed_results_can_be_read() -> None:
    path = Path(__file__).parents[2] / "benchmarks/results/kernels-h200.json"
    found = list(compared(json.loads(path.read_text())["rows"]))
    kinds = {(one.mixer, one.phase) for one in found}
    # KDA's decode step with fused gates has a peer in SGLang only.
    mixers = set(Mixer) - {Mixer.LIGHTNING, Mixer.MODEL_CLASS}
    phases = (Phase.PREFILL, Phase.DECODE)
    assert kinds == {(mixer, phase) for mixer in mixers for phase in phases}


def test_what_auto_takes_was_measured() -> None:
    results = Path(__file__).parents[2] / "benchmarks/results"
    names = ("kernels-h200.json", "kernels-flashinfer-h200.json")
    measured = as_fast(
        compared(
            row
            for name in names
            for row in json.loads((results / name).read_text())["rows"]
        ),
        0.95,
    )
    for mixer, phases in kernel_choice.AS_FAST.items():
        for phase, libraries in phases.items():
            for library, tokens in libraries.items():
                assert tokens <= measured[mixer][phase][library]
