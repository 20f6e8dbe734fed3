# SPDX-License-Identifier: Apache-2.0
"""ModelShape: all that capacity and cost depend on, and nothing of the weights."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid_plugin.core.memory.attention_windows import AttentionWindow, ChunkedLocal
from hybrid_plugin.core.memory.layout import AttentionGroup, CacheLayout, StateGroup


@dataclass(frozen=True, slots=True)
class AttentionLayers:
    """Attention layers that are alike and own KV."""

    count: int
    window: AttentionWindow
    token_bytes: int
    """KV of one token in one layer."""
    pair_flops: float
    """Cost of one token's look at one other token, in one layer."""
    formula: str
    """How `token_bytes` comes about."""


@dataclass(frozen=True, slots=True)
class StateLayers:
    """State layers that are alike."""

    count: int
    kind: str
    """What they are called."""
    state_bytes: int
    """All states of one sequence in one layer."""
    formula: str
    """How `state_bytes` comes about."""
    record_bytes: int = 0
    """What a record of one verified token takes in one layer; 0 if there is none."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The layers of one model on one rank."""

    name: str
    layers: int
    attention: tuple[AttentionLayers, ...]
    states: tuple[StateLayers, ...]
    parameters: float
    """Weights on this rank, estimated."""
    active_parameters: float
    """Weights that one token is multiplied with."""
    weight_bytes: float
    """Bytes of one weight."""
    in_sglang: ModelShape | None = None
    """The same with states in the type that SGLang chooses; None where vLLM chooses the
    same one."""

    @property
    def for_sglang(self) -> ModelShape:
        """The shape in SGLang."""
        return self.in_sglang or self

    @property
    def token_bytes(self) -> int:
        """KV of one token over all attention layers, whatever their window."""
        return sum(group.count * group.token_bytes for group in self.attention)

    @property
    def state_bytes(self) -> int:
        """States of one sequence over all state layers."""
        return sum(group.count * group.state_bytes for group in self.states)

    @property
    def record_bytes(self) -> int:
        """What records of one verified token take over all state layers; 0 if not all
        of them can be recorded.
        """
        each = [group.count * group.record_bytes for group in self.states]
        return sum(each) if all(each) else 0

    def layout(self, page_size: int) -> CacheLayout:
        """Sizes of a page and a slot, for pages of `page_size` tokens."""
        return CacheLayout(
            page_size=page_size,
            attention=tuple(
                AttentionGroup(
                    tuple(f"attention.{index}.{i}" for i in range(group.count)),
                    group.token_bytes * page_size,
                    group.window,
                )
                for index, group in enumerate(self.attention)
            ),
            states=tuple(
                StateGroup(
                    tuple(f"state.{index}.{i}" for i in range(group.count)),
                    group.state_bytes,
                )
                for index, group in enumerate(self.states)
            ),
        )

    def prefill_flops(self, tokens: float) -> float:
        """Cost of computing the first `tokens` tokens of a sequence.

        Two operations a weight and token, and the attention's own: what a token
        sees grows with its position, up to the reach of a window.
        """
        cost = 2.0 * self.active_parameters * tokens
        for group in self.attention:
            cost += group.count * group.pair_flops * pairs(group.window, tokens)
        return cost


def pairs(window: AttentionWindow, tokens: float) -> float:
    """Pairs of tokens that look at each other among the first `tokens`."""
    if isinstance(window, ChunkedLocal):
        chunks, rest = divmod(tokens, window.chunk)
        return float(chunks * window.chunk**2 + rest**2) / 2
    reach = tokens - window.first_needed(int(tokens))
    return (tokens - reach / 2) * reach
