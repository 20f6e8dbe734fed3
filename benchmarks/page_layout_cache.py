# SPDX-License-Identifier: Apache-2.0
"""The steps and the caches of `page_layout`: equal contents in either layout."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Shape:
    """Attention layers of a model, on one GPU."""

    name: str
    layers: int
    query_heads: int
    kv_heads: int
    width: int
    page_size: int = 16


@dataclass(frozen=True)
class Load:
    """Sequences of a step."""

    name: str
    sequences: int
    context: int
    """Tokens of each sequence, the new ones included."""
    new: int
    """Tokens of each that the step computes."""


class Batch:
    """A step's tensors: queries, new keys and values, and where tokens lie."""

    def __init__(
        self, shape: Shape, load: Load, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.shape, self.load, self.device, self.dtype = shape, load, device, dtype
        per_sequence = -(-load.context // shape.page_size)
        self.pages = load.sequences * per_sequence + 1
        order = torch.randperm(self.pages - 1, device=device) + 1
        self.table = order.view(load.sequences, per_sequence).to(torch.int32)
        within = torch.arange(shape.page_size, device=device)
        tokens = self.table[:, :, None].long() * shape.page_size + within
        self.tokens = tokens.reshape(load.sequences, -1)[:, : load.context]
        """`[sequences, context]` int64, where each token lies."""
        # Kernels take them for contiguous.
        self.fresh = self.tokens[:, load.context - load.new :].reshape(-1).contiguous()
        count = len(self.fresh)
        self.query = self._random(count, shape.query_heads)
        self.key, self.value = (self._random(count, shape.kv_heads) for _ in range(2))
        self.starts = self._steps(load.new)
        self.lengths = torch.full(
            (load.sequences,), load.context, dtype=torch.int32, device=device
        )
        self.scale = 1 / math.sqrt(shape.width)

    def _random(self, tokens: int, heads: int) -> torch.Tensor:
        made = torch.randn(tokens, heads, self.shape.width, device=self.device)
        return made.to(self.dtype)

    def _steps(self, step: int) -> torch.Tensor:
        count = self.load.sequences + 1
        return step * torch.arange(count, dtype=torch.int32, device=self.device)

    def prefix(self) -> tuple[torch.Tensor, torch.Tensor]:
        """int32 starts and int64 places of the tokens before the new ones."""
        length = self.load.context - self.load.new
        return self._steps(length), self.tokens[:, :length].reshape(-1).contiguous()


class Cache:
    """Keys and values of all layers, filled equally whichever way they lie.

    Pages are vLLM's, with keys and values of a head beside each other, or SGLang's,
    with all heads' keys of a token and then its values.
    """

    def __init__(self, batch: Batch, *, packed: bool, by_page: bool) -> None:
        shape, self.by_page = batch.shape, by_page
        tokens, width = batch.pages * shape.page_size, shape.width
        if by_page:
            item = (shape.page_size, shape.kv_heads, 2 * width)
            count = batch.pages
        else:
            item = (2, shape.kv_heads, width)
            count = tokens
        dims = (count, shape.layers) if packed else (shape.layers, count)
        if not packed and not by_page:  # a layer's keys, then its values
            dims, item = (shape.layers, 2), (tokens, *item[1:])
        memory = torch.empty((*dims, *item), device=batch.device, dtype=batch.dtype)
        self.bytes = memory.nbytes
        self._layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        for layer in range(shape.layers):
            part = memory[:, layer] if packed else memory[layer]
            if by_page:
                self._layers.append((part[..., :width], part[..., width:]))
            elif packed:
                self._layers.append((part[:, 0], part[:, 1]))
            else:
                self._layers.append((part[0], part[1]))
        generator = torch.Generator(device=batch.device)
        for layer, both in enumerate(self._layers):
            generator.manual_seed(layer)
            for part in both:
                part.copy_(
                    torch.randn(
                        part.shape,
                        generator=generator,
                        device=batch.device,
                        dtype=batch.dtype,
                    )
                )

    def layer(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values: `[pages, page size, heads, width]`, or by token."""
        return self._layers[number]
