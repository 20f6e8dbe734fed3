# SPDX-License-Identifier: Apache-2.0
"""A kit of plain PyTorch, with ranks that are threads: no engine, exact, and slow.

`Session` runs a model as an engine does: sequences with slots, single tokens before
prompts, prompts in parts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from hybrid_models.architecture import Architecture
from hybrid_models.blocks.expansion import expanded
from hybrid_models.kit import (
    Elementwise,
    LatentShape,
    Mix,
    Rope,
    Routing,
    StateTensor,
    part,
)
from hybrid_models.tiling import tile
from hybrid_models.weights import EXPERTS, load
from torch import nn
from torch.nn import functional

from hybrid_plugin.mixers.fixed_prefills import FixedPrefills
from hybrid_plugin.mixers.prefills import Prefills
from hybrid_plugin.mixers.state_pass import StatePass

CHUNK = 64


class Together:
    """Sums tensors of threads."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks)
        self._tensors: list[torch.Tensor] = [torch.empty(0)] * ranks

    def sum(self, rank: int, x: torch.Tensor) -> torch.Tensor:
        """Of what every rank gives."""
        self._tensors[rank] = x
        self._barrier.wait()
        total = torch.stack(self._tensors).sum(0)
        self._barrier.wait()
        return total

    def abort(self) -> None:
        """Let nobody wait for a rank that failed."""
        self._barrier.abort()


@dataclass(frozen=True)
class MixCall:
    """What a state layer was given, and what runs it."""

    mix: Mix
    state_pass: StatePass
    inputs: Sequence[torch.Tensor]
    pools: Sequence[torch.Tensor]
    out: torch.Tensor
    captured: bool
    """As the kit was told."""


@dataclass
class Rank:
    """What layers of one rank find out about the pass, and keep."""

    rank: int
    together: Together
    state_pass: StatePass | None = None
    spans: list[tuple[int, int, int]] = field(default_factory=list)
    """Slot, first row and last row of each sequence of the pass."""
    pools: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    calls: dict[int, MixCall] = field(default_factory=dict)
    """By layer: what its states were mixed with last."""
    keys: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = field(
        default_factory=dict
    )
    """By layer and slot: keys and values so far."""


class Column(nn.Module):
    """Parts, each of which is cut among ranks."""

    def __init__(
        self, inner: int, outs: Sequence[int], bias: bool, rank: Rank, ranks: int
    ) -> None:
        super().__init__()
        self._outs, self._rank, self._ranks = list(outs), rank.rank, ranks
        for out in outs:
            assert out % ranks == 0, f"{ranks} ranks do not divide {out}"
        own = sum(outs) // ranks
        self.weight = nn.Parameter(torch.full((own, inner), torch.nan))
        self.bias = nn.Parameter(torch.full((own,), torch.nan)) if bias else None
        for parameter in filter(lambda p: p is not None, (self.weight, self.bias)):
            parameter.weight_loader = self._load

    def _load(
        self, parameter: torch.Tensor, loaded: torch.Tensor, shard: int | None = None
    ) -> None:
        if shard is None:
            for number, piece in enumerate(loaded.split(self._outs)):
                self._load(parameter, piece, number)
            return
        start = sum(self._outs[:shard]) // self._ranks
        own = self._outs[shard] // self._ranks
        assert len(loaded) == self._outs[shard], (loaded.shape, self._outs, shard)
        cut = loaded.narrow(0, self._rank * own, own)
        parameter.data[start : start + own].copy_(cut)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias)


class Qkv(Column):
    """Heads of queries, keys and values; keys repeated where ranks are more."""

    _SHARDS: ClassVar[dict[str, int]] = {"q": 0, "k": 1, "v": 2}

    def __init__(
        self,
        hidden: int,
        head: int,
        heads: int,
        kv_heads: int,
        bias: bool,
        rank: Rank,
        ranks: int,
    ) -> None:
        times = max(ranks // kv_heads, 1)
        kv = max(kv_heads, ranks) * head
        super().__init__(hidden, [heads * head, kv, kv], bias, rank, ranks)
        self._times, self._head = times, head

    def _load(
        self, parameter: torch.Tensor, loaded: torch.Tensor, shard: Any = None
    ) -> None:
        if shard in ("k", "v") and self._times > 1:
            heads = loaded.unflatten(0, (-1, self._head))
            loaded = heads.repeat_interleave(self._times, 0).flatten(0, 1)
        super()._load(parameter, loaded, self._SHARDS.get(shard, shard))


class Row(nn.Module):
    """Cut along its inputs, summed over ranks."""

    def __init__(
        self, inner: int, out: int, bias: bool, rank: Rank, ranks: int
    ) -> None:
        super().__init__()
        self._rank, self._own = rank, inner // ranks
        assert inner % ranks == 0
        self.weight = nn.Parameter(torch.full((out, self._own), torch.nan))
        self.bias = nn.Parameter(torch.full((out,), torch.nan)) if bias else None
        self.weight.weight_loader = self._load  # type: ignore[attr-defined]

    def _load(self, parameter: torch.Tensor, loaded: torch.Tensor) -> None:
        start = self._rank.rank * self._own
        parameter.data.copy_(loaded.narrow(1, start, self._own))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        summed = self._rank.together.sum(
            self._rank.rank, functional.linear(x, self.weight)
        )
        return summed if self.bias is None else summed + self.bias


class Norm(nn.Module):
    """RMS norm in float32."""

    def __init__(self, size: int, eps: float, centred: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), torch.nan))
        self._eps, self._centred = eps, centred

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if residual is not None:
            total = x + residual
            # Engines may write into both.
            x.fill_(torch.nan)
            residual.fill_(torch.nan)
            return self(total), total
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self._eps)
        weight = self.weight.float()
        return (x.float() * scale * (1 + weight if self._centred else weight)).to(
            x.dtype
        )


class Attention(nn.Module):
    """Over all keys of a sequence, or those of a window."""

    def __init__(
        self,
        layer: int,
        heads: int,
        kv_heads: int,
        head: int,
        scale: float,
        window: int | None,
        rank: Rank,
        source: Attention | None = None,
    ) -> None:
        super().__init__()
        # Not a module of this one, too.
        self._source = [] if source is None else [source]
        self._layer, self._heads, self._kv_heads = layer, heads, kv_heads
        self._head, self._scale, self._window = head, scale, window
        self._rank = rank

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        out = q.new_zeros(q.shape[0], self._heads * (v.shape[-1] // self._kv_heads))
        for slot, start, end in self._rank.spans:
            out[start:end] = self._sequence(
                slot, q[start:end], k[start:end], v[start:end]
            )
        return out

    def _sequence(
        self, slot: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        k, v = self._known(slot, k, v)
        split = (
            x.view(len(x), heads, -1).transpose(0, 1)
            for x, heads in ((q, self._heads), (k, self._kv_heads), (v, self._kv_heads))
        )
        distance = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
        mask = distance >= 0
        if self._window is not None:
            mask &= distance < self._window
        result = functional.scaled_dot_product_attention(
            *split, attn_mask=mask, scale=self._scale, enable_gqa=True
        )
        return result.transpose(0, 1).flatten(1)

    def _known(
        self, slot: int, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values of a sequence, those given among them."""
        keys = self._rank.keys
        for source in self._source:
            known = keys[source._layer, slot]
            assert all(
                torch.equal(kept[len(kept) - len(new) :], new)
                for kept, new in zip(known, (k, v), strict=True)
            ), "not those that the other layer was given"
            return known
        known = keys.get((self._layer, slot), (k[:0], v[:0]))
        keys[self._layer, slot] = torch.cat([known[0], k]), torch.cat([known[1], v])
        return keys[self._layer, slot]


class Expanded(nn.Module):
    """Attention over latent vectors, by keys and values of each head."""

    def __init__(
        self, shape: LatentShape, expand: nn.Module, attend: Attention
    ) -> None:
        super().__init__()
        self._shape, self._expand, self._attend = shape, [expand], attend

    def forward(
        self, q: torch.Tensor, latent: torch.Tensor, turned: torch.Tensor
    ) -> torch.Tensor:
        k, v = expanded(self._expand[0], self._shape, latent, turned)
        return self._attend(q.flatten(1), k.flatten(1), v.flatten(1))


class States(nn.Module):
    """Slots of one layer."""

    def __init__(
        self,
        layer: int,
        tensors: Sequence[StateTensor],
        mix: Mix,
        width: int,
        rank: Rank,
        slots: int,
        captured: bool,
    ) -> None:
        super().__init__()
        self._layer, self._mix, self._width, self._rank = layer, mix, width, rank
        self._captured = captured
        rank.pools[layer] = [
            torch.full((slots, *t.shape), torch.nan, dtype=t.dtype) for t in tensors
        ]

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        # Nothing here is padded but passes of a graph's shape.
        out = inputs[0].new_full((len(inputs[0]), self._width), torch.nan)
        state_pass, pools = self._rank.state_pass, self._rank.pools[self._layer]
        assert state_pass is not None
        padding = state_pass.padding
        if padding is not None:
            inputs = tuple(_poisoned(x, padding) for x in inputs)
        self._mix(state_pass, inputs, pools, out)
        call = MixCall(self._mix, state_pass, inputs, pools, out, self._captured)
        self._rank.calls[self._layer] = call
        return out if padding is None else out.masked_fill(padding[:, None], 0)


def _poisoned(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """A copy, with rows that nobody may read."""
    wide = rows.view(-1, *[1] * (x.ndim - 1))
    return x.masked_fill(wide, torch.nan)


class Experts(nn.Module):
    """Every expert on every token, weighed by zero where it was not chosen."""

    def __init__(
        self, hidden: int, inner: int, count: int, routing: Routing, rank: Rank
    ) -> None:
        super().__init__()
        assert routing.groups is None or routing.top_groups is not None
        self._routing, self._rank, self._inner = routing, rank, inner
        self._count = count
        for part_name in ("gate", "up", "down"):
            shape = (hidden, inner) if part_name == "down" else (inner, hidden)
            empty = torch.full((count, *shape), torch.nan)
            setattr(self, part_name, nn.Parameter(empty))
        setattr(self, EXPERTS, self._give)

    def _give(
        self, expert: int, part_name: str, kind: str, tensor: torch.Tensor
    ) -> None:
        assert kind == "weight"
        axis = 1 if part_name == "down" else 0
        own = tensor.narrow(axis, self._rank.rank * self._inner, self._inner)
        getattr(self, part_name).data[expert].copy_(own)

    def weights(self, logits: torch.Tensor) -> torch.Tensor:
        """Of each expert, ``[T, count]``."""
        routing = self._routing
        if routing.choose is not None:
            chosen, experts = routing.choose(logits)
            return torch.zeros(len(logits), self._count).scatter(
                -1, experts.long(), chosen
            )
        scores = (
            logits.float().softmax(-1)
            if routing.scoring == "softmax"
            else logits.float().sigmoid()
        )
        ranked = scores if routing.bias is None else scores + routing.bias
        if routing.groups is not None:
            groups = ranked.unflatten(-1, (routing.groups, -1))
            best = groups.topk(2, -1).values.sum(-1).topk(routing.top_groups or 1, -1)
            chosen = torch.zeros(groups.shape[:2]).scatter(-1, best.indices, 1.0)
            ranked = torch.where(chosen[..., None] > 0, groups, 0.0).flatten(-2)
        top = ranked.topk(routing.top, -1).indices
        kept = torch.zeros_like(scores).scatter(-1, top, scores.gather(-1, top))
        if routing.renormalise:
            kept = kept / kept.sum(-1, keepdim=True)
        return kept * routing.scale

    def forward(self, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        gate = torch.einsum("th,eih->tei", x, self.gate)
        up = torch.einsum("th,eih->tei", x, self.up)
        inner = functional.silu(gate) * up * self.weights(logits)[..., None]
        out = torch.einsum("tei,ehi->th", inner, self.down)
        return self._rank.together.sum(self._rank.rank, out)


def _frequencies(
    turned: int, parameters: Mapping[str, Any], longest: int
) -> tuple[torch.Tensor, float]:
    """Of a rotary embedding by pair, and the factor of what it gives."""
    kind = parameters.get("rope_type", "default")
    if kind == "default":
        steps = torch.arange(0, turned, 2).float() / turned
        return parameters["rope_theta"] ** -steps, 1.0
    from transformers import PretrainedConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = PretrainedConfig(
        head_dim=turned,
        hidden_size=turned,
        num_attention_heads=1,
        max_position_embeddings=longest,
        rope_parameters=dict(parameters),
    )
    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))


class PlainKit:
    """A `hybrid_models.kit.Kit`."""

    goes_by_rows = True
    """As of an engine with adapters."""

    def __init__(self, rank: Rank, ranks: int, slots: int) -> None:
        self.ranks, self.rank = ranks, rank.rank
        self.dtype = self.conv_dtype = self.state_dtype = torch.float32
        self._rank, self._slots = rank, slots

    def embedding(self, vocabulary: int, hidden: int, *, name: str) -> nn.Module:
        return nn.Embedding(vocabulary, hidden)

    def head(
        self, vocabulary: int, hidden: int, *, name: str, tied: nn.Module | None = None
    ) -> nn.Module:
        return nn.Linear(hidden, vocabulary, bias=False) if tied is None else tied

    def column(
        self,
        inner: int,
        outs: Sequence[int],
        *,
        name: str,
        bias: bool = False,
        whole: Sequence[bool] = (),
    ) -> nn.Module:
        return tile(
            self.ranks,
            outs,
            whole,
            lambda sizes: Column(inner, sizes, bias, self._rank, self.ranks),
        )

    def row(self, inner: int, out: int, *, name: str, bias: bool = False) -> nn.Module:
        return Row(inner, out, bias, self._rank, self.ranks)

    def replicated(
        self, inner: int, out: int, *, name: str, bias: bool = False
    ) -> nn.Module:
        return nn.Linear(inner, out, bias=bias)

    def qkv(
        self,
        hidden: int,
        head: int,
        heads: int,
        kv_heads: int,
        *,
        name: str,
        bias: bool = False,
    ) -> nn.Module:
        return Qkv(hidden, head, heads, kv_heads, bias, self._rank, self.ranks)

    def norm(self, size: int, eps: float, *, centred: bool = False) -> nn.Module:
        return Norm(size, eps, centred)

    def silu_gated(self) -> Elementwise:
        def gated(both: torch.Tensor) -> torch.Tensor:
            gate, up = both.chunk(2, dim=-1)
            return functional.silu(gate) * up

        return gated

    def rope(
        self,
        head: int,
        parameters: Mapping[str, Any],
        longest: int,
        *,
        neox: bool = True,
    ) -> Rope:
        turned = int(head * parameters.get("partial_rotary_factor", 1.0))
        frequency, stretch = _frequencies(turned, parameters, longest)

        def turn(angles: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            heads = x.view(len(x), -1, head)
            first, rest = heads[..., :turned], heads[..., turned:]
            cos, sin = (x[:, None] * stretch for x in (angles.cos(), angles.sin()))
            if neox:
                a, b = first.chunk(2, dim=-1)
                pair = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
            else:
                a, b = first[..., ::2], first[..., 1::2]
                pair = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1)
                pair = pair.flatten(-2)
            return torch.cat([pair, rest], dim=-1).view(x.shape)

        def rope(
            positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            angles = positions[:, None].float() * frequency
            return turn(angles, q), turn(angles, k)

        return rope

    def attention(
        self,
        layer: int,
        heads: int,
        kv_heads: int,
        head: int,
        *,
        scale: float,
        name: str,
        window: int | None = None,
        source: Any = None,
    ) -> nn.Module:
        own = max(kv_heads // self.ranks, 1)
        heads = part(self, heads)
        return Attention(layer, heads, own, head, scale, window, self._rank, source)

    def latent_attention(
        self,
        layer: int,
        shape: LatentShape,
        expand: nn.Module,
        *,
        scale: float,
        name: str,
    ) -> nn.Module:
        heads = part(self, shape.heads)
        return Expanded(
            shape,
            expand,
            Attention(layer, heads, heads, shape.head, scale, None, self._rank),
        )

    def router(self, hidden: int, count: int, *, name: str) -> nn.Module:
        return nn.Linear(hidden, count, bias=False)

    def experts(
        self,
        layer: int,
        hidden: int,
        inner: int,
        count: int,
        routing: Routing,
        *,
        name: str,
    ) -> nn.Module:
        return Experts(hidden, part(self, inner), count, routing, self._rank)

    def states(
        self,
        layer: int,
        tensors: Sequence[StateTensor],
        mix: Mix,
        *,
        width: int,
        name: str,
        captured: bool = False,
    ) -> nn.Module:
        return States(layer, tensors, mix, width, self._rank, self._slots, captured)

    def layers(
        self, count: int, build: Callable[[int, str], nn.Module], *, name: str
    ) -> nn.ModuleList:
        return nn.ModuleList(build(i, f"{name}.{i}") for i in range(count))

    def sum_over_ranks(self, x: torch.Tensor) -> torch.Tensor:
        return self._rank.together.sum(self.rank, x)


class Model(nn.Module):
    """An architecture and its head."""

    def __init__(
        self, architecture: type[Architecture], config: Any, kit: PlainKit
    ) -> None:
        super().__init__()
        self.model = architecture(config, kit, name="model")
        tied = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = kit.head(
            config.vocab_size, config.hidden_size, name="lm_head", tied=tied
        )
        self._cap = architecture.logit_cap(config)
        self._scale = architecture.logit_scale(config)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = self.model(ids, positions)
        logits = functional.linear(hidden, self.lm_head.weight) * self._scale
        if self._cap is None:
            return logits
        return torch.tanh(logits / self._cap) * self._cap


class Session:
    """A model on some ranks, and the sequences that it computes."""

    def __init__(
        self,
        architecture: type[Architecture],
        config: Any,
        tensors: Iterable[tuple[str, torch.Tensor]],
        *,
        ranks: int = 1,
        slots: int = 8,
    ) -> None:
        together, self._together = Together(ranks), None
        self._together = together
        self._ranks = [Rank(rank, together) for rank in range(ranks)]
        given = list(tensors)
        self._models = []
        for rank in self._ranks:
            model = Model(architecture, config, PlainKit(rank, ranks, slots)).eval()
            load(model, given, architecture.NAMES)
            self._models.append(model)
        self._computed: dict[int, int] = {}
        self._threads = ThreadPoolExecutor(ranks)

    def run(
        self,
        sequences: Mapping[int, Sequence[int]],
        fixed: FixedPrefills | None = None,
    ) -> dict[int, torch.Tensor]:
        """Compute tokens behind those that each slot has; logits behind each of them.

        Args:
            sequences: by slot.
            fixed: where the pass of a graph's shape is described; None for one of its
                own.
        """
        order = sorted(sequences, key=lambda slot: self._is_prompt(slot, sequences))
        spans, start = [], 0
        for slot in order:
            spans.append((slot, start, start + len(sequences[slot])))
            start += len(sequences[slot])
        ids = torch.tensor([token for slot in order for token in sequences[slot]])
        positions = torch.cat(
            [
                torch.arange(len(sequences[slot])) + self._computed.get(slot, 0)
                for slot in order
            ]
        )
        if fixed is None:
            described = self._describe(order, sequences)
        else:
            described = self._describe_fixed(order, sequences, fixed)
            room = (0, described.tokens - len(ids))
            ids, positions = functional.pad(ids, room), functional.pad(positions, room)
        logits = self._on_all_ranks(ids, positions, described, spans)
        for slot in order:
            self._computed[slot] = self._computed.get(slot, 0) + len(sequences[slot])
        return {slot: logits[first:last] for slot, first, last in spans}

    def fork(self, source: int, target: int) -> None:
        """Have a slot go on from where another one is."""
        self._computed[target] = self._computed[source]
        for rank in self._ranks:
            for layer, pools in rank.pools.items():
                for pool in pools:
                    pool[target] = pool[source]
                if (layer, source) in rank.keys:
                    rank.keys[layer, target] = rank.keys[layer, source]
            for layer, slot in list(rank.keys):
                if slot == source:
                    rank.keys[layer, target] = rank.keys[layer, source]

    def _is_prompt(self, slot: int, sequences: Mapping[int, Sequence[int]]) -> bool:
        return len(sequences[slot]) > 1 or not self._computed.get(slot)

    def _describe(
        self, order: Sequence[int], sequences: Mapping[int, Sequence[int]]
    ) -> StatePass:
        decodes = sum(not self._is_prompt(slot, sequences) for slot in order)
        prompts = order[decodes:]
        lengths = torch.tensor([len(sequences[slot]) for slot in prompts])
        computed = torch.tensor([self._computed.get(slot, 0) for slot in prompts])
        prefills = None
        if prompts:
            prefills = Prefills(
                cu_seqlens=functional.pad(lengths.cumsum(0), (1, 0)).int(),
                slots=torch.tensor(prompts),
                has_initial=computed > 0,
                offsets=(computed % CHUNK).int(),
            )
        tokens = decodes + int(lengths.sum())
        return StatePass(decodes, tokens, torch.tensor(order[:decodes]), prefills)

    def _describe_fixed(
        self,
        order: Sequence[int],
        sequences: Mapping[int, Sequence[int]],
        fixed: FixedPrefills,
    ) -> StatePass:
        """Every sequence as a prompt, in tensors that stay."""
        fixed.fill(
            torch.tensor([len(sequences[slot]) for slot in order]),
            torch.tensor([self._computed.get(slot, 0) for slot in order]),
            torch.tensor(order),
            None,
        )
        tokens, held = len(fixed.padding), fixed.prefills
        return StatePass(0, tokens, held.slots[:0], held, padding=fixed.padding)

    def _on_all_ranks(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        described: StatePass,
        spans: list[tuple[int, int, int]],
    ) -> torch.Tensor:
        def one(number: int) -> torch.Tensor:
            rank = self._ranks[number]
            rank.state_pass, rank.spans = described, spans
            try:
                with torch.no_grad():
                    result: torch.Tensor = self._models[number](ids, positions)
                return result
            except BaseException:
                rank.together.abort()
                raise

        found = list(self._threads.map(one, range(len(self._ranks))))
        for other in found[1:]:
            torch.testing.assert_close(other, found[0], rtol=0, atol=0)
        return found[0]
