# SPDX-License-Identifier: Apache-2.0
"""Where our kernels are at least as fast as an engine's: a layer, not an operation.

A layer runs several operations one after the other.  Its time is their sum, for us and
for each engine, at each measured size of each model.  An engine takes the fastest
kernel that it can choose for an operation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from hybrid_plugin.engine.kernel_choice import (
    EVERY,
    FLASHINFER,
    TRITON,
    Mixer,
    Phase,
)

OURS = "hybrid_kernels"
ENGINES: Mapping[str, str] = {"vLLM": "vllm", "SGLang": "sglang"}
"""What the names of an engine's own kernels begin with, which are in Triton."""
OTHERS = (FLASHINFER,)
"""Libraries that both engines can take a layer's rule from, and not its convolution."""
_CONVOLUTION = {
    Phase.PREFILL: "causal_conv1d.prefill",
    Phase.DECODE: "causal_conv1d.update",
}
_RULES: Mapping[Mixer, Mapping[Phase, str]] = {
    Mixer.GATED_DELTA_NET: {
        Phase.PREFILL: "gated_delta_rule.prefill",
        Phase.DECODE: "gated_delta_rule.update, gates fused",
    },
    Mixer.KDA: {
        Phase.PREFILL: "kda.prefill",
        Phase.DECODE: "kda.update, gates fused",
    },
    Mixer.MAMBA2: {Phase.PREFILL: "ssd.prefill", Phase.DECODE: "ssd.update"},
    Mixer.SHORT_CONV: {},
}
"""What a layer runs besides its convolution."""

Row = Mapping[str, Any]
"""A row of the JSON that `kernels.py` writes."""


@dataclass(frozen=True)
class Compared:
    """A layer at one size, beside one engine's."""

    mixer: Mixer
    phase: Phase
    shape: str
    size: str
    engine: str
    library: str
    """Of the rule, as `kernel_choice` names it."""
    kernels: tuple[str, ...]
    """That the engine takes, one for each operation."""
    ours: float
    """Microseconds of the layer."""
    theirs: float
    """The same."""

    @property
    def tokens(self) -> int:
        """Of a pass of this size: sequences by tokens of each, or sequences."""
        return prod(int(part) for part in self.size.split(" x "))

    @property
    def ratio(self) -> float:
        """Their time over ours: above 1 ours is faster."""
        return self.theirs / self.ours


def compared(rows: Iterable[Row]) -> Iterator[Compared]:
    """Every layer at every size that was measured for us and for an engine.

    Args:
        rows: of one run, and behind them those of others for libraries that it lacks.
    """
    points: dict[tuple[str, str], dict[str, dict[str, float]]] = {}
    for row in rows:
        sizes = points.setdefault((row["op"], row["size"]), {})
        times = sizes.setdefault(row["shape"], {})
        times.setdefault(row["library"], row["microseconds"])
    for mixer, rules in _RULES.items():
        for phase, convolution in _CONVOLUTION.items():
            own = rules.get(phase, convolution)
            rest = [convolution] if own != convolution else []
            for (op, size), shapes in points.items():
                if op != own:
                    continue
                # Convolutions are measured with one number of channels.
                others = [
                    next(iter(points.get((other, size), {}).values()), {})
                    for other in rest
                ]
                for shape, times in shapes.items():
                    yield from _layer(mixer, phase, shape, size, [times, *others])


def _layer(
    mixer: Mixer,
    phase: Phase,
    shape: str,
    size: str,
    times: Sequence[Mapping[str, float]],
) -> Iterator[Compared]:
    if not all(OURS in of_op for of_op in times):
        return
    ours = sum(of_op[OURS] for of_op in times)
    rule, *rest = times
    for engine, own in ENGINES.items():
        for library, prefix in ((TRITON, own), *zip(OTHERS, OTHERS, strict=True)):
            best = [_fastest(rule, prefix), *[_fastest(of_op, own) for of_op in rest]]
            kernels = tuple(name for name in best if name is not None)
            if len(kernels) < len(times):
                continue
            pairs = zip(times, kernels, strict=True)
            theirs = sum(of_op[name] for of_op, name in pairs)
            yield Compared(
                mixer, phase, shape, size, engine, library, kernels, ours, theirs
            )


def _fastest(times: Mapping[str, float], prefix: str) -> str | None:
    """The fastest kernel whose name begins so; None if there is none."""
    names = [name for name in times if name.startswith(prefix)]
    return min(names, key=times.__getitem__, default=None)


def worst(
    found: Iterable[Compared],
) -> dict[tuple[Mixer, Phase, str], Compared]:
    """Of each kind of layer, phase and library, where we are slowest."""
    least: dict[tuple[Mixer, Phase, str], Compared] = {}
    for one in found:
        key = (one.mixer, one.phase, one.library)
        if key not in least or one.ratio < least[key].ratio:
            least[key] = one
    return least


Table = dict[Mixer, dict[Phase, dict[str, int]]]


def as_fast(found: Iterable[Compared], least: float) -> Table:
    """The table `AS_FAST`: where no ratio to a library is below `least`.

    A phase counts at all sizes, or, a prefill, at all up to the largest measured one
    before the first that is slower.
    """
    groups: dict[tuple[Mixer, Phase, str], list[Compared]] = {}
    for one in found:
        groups.setdefault((one.mixer, one.phase, one.library), []).append(one)
    table: Table = {}
    for (mixer, phase, library), group in groups.items():
        reach = _reach(group, least)
        if reach == EVERY or (reach and phase is Phase.PREFILL):
            table.setdefault(mixer, {}).setdefault(phase, {})[library] = reach
    return table


def _reach(group: Sequence[Compared], least: float) -> int:
    """Tokens of the largest size before the first slow one; 0 if that is the first."""
    slow = [one.tokens for one in group if one.ratio < least]
    if not slow:
        return EVERY
    return max((one.tokens for one in group if one.tokens < min(slow)), default=0)


def as_python(table: Table) -> str:
    """The table as it stands in `kernel_choice.py`."""
    lines = ["AS_FAST: Mapping[Mixer, Mapping[Phase, Mapping[str, int]]] = {"]
    names = {TRITON: "TRITON", FLASHINFER: "FLASHINFER"}
    for mixer, phases in table.items():
        lines.append(f"    Mixer.{mixer.name}: {{")
        for phase, libraries in phases.items():
            entries = ", ".join(
                f"{names.get(library, repr(library))}: "
                f"{'EVERY' if tokens == EVERY else tokens}"
                for library, tokens in libraries.items()
            )
            lines.append(f"        Phase.{phase.name}: {{{entries}}},")
        lines.append("    },")
    return "\n".join([*lines, "}"])


def as_markdown(found: Sequence[Compared], least: float) -> str:
    """Each kind of layer and phase with its worst ratio to each engine."""
    lines = [
        "| layer | phase | engine | sizes | slower at | worst ratio | at | "
        "the engine's kernels |",
        "|---|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[Mixer, Phase, str, str], list[Compared]] = {}
    for one in found:
        key = (one.mixer, one.phase, one.engine, one.library)
        groups.setdefault(key, []).append(one)
    for (mixer, phase, engine, _), group in groups.items():
        slow = min(group, key=lambda one: one.ratio)
        behind = sum(one.ratio < least for one in group)
        lines.append(
            f"| {mixer} | {phase} | {engine} | {len(group)} | {behind} | "
            f"{slow.ratio:.2f} | {slow.shape}, {slow.size} | "
            f"{', '.join(slow.kernels)} |"
        )
    return "\n".join(lines)
