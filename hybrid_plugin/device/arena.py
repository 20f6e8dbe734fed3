# SPDX-License-Identifier: Apache-2.0
"""The memory of a pool, seen as rows: one row, or several parts of one, per id."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from hybrid_plugin.device.virtual_arena import (
    AddressRange,
    ByteRange,
    Refusal,
    VirtualArena,
)

_COPY_BYTES = 16 << 20
"""Of one part that are copied at once: it takes as much memory meanwhile."""
_WORD = 8


class Arena:
    """Bytes of one pool.

    A layer-major pool has one part per layer, a slot-major pool a single one;
    page or slot `i` is row `i` of every part.
    """

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        """Take over the memory.

        Args:
            parts: `[ids, bytes]` int8 tensors with contiguous rows; ids and
                device must be equal.
        """
        shapes = {(part.dim(), part.shape[0], part.device) for part in parts}
        if len(shapes) != 1 or next(iter(shapes))[0] != 2:
            raise ValueError("the parts of an arena are matrices with equal row counts")
        self.parts = tuple(parts)
        self._words = [_in_words(part) for part in parts]

    @property
    def capacity(self) -> int:
        """Number of ids, the reserved one included."""
        return self.parts[0].shape[0]

    def zero(self, index: int) -> None:
        """Clear one id, in order on the current stream."""
        for part in self.parts:
            part[index].zero_()

    def copy(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy ids over others, in order on the current stream.

        Pages are many and small, so a layer copies many at once; a slot is large
        enough to be copied alone, and to need no memory for others beside it.

        Args:
            sources: ids to read, none of which is written here.
            destinations: one for each, all different.
        """
        if len(self.parts) == 1 or len(sources) == 1:
            for source, destination in zip(sources, destinations, strict=True):
                for part in self.parts:
                    part[destination].copy_(part[source])
            return
        most = max(_COPY_BYTES // self.parts[0].shape[1], 1)
        ids = torch.tensor([sources, destinations], dtype=torch.int64)
        ids = to_device(ids, self.parts[0].device)
        for begin in range(0, len(sources), most):
            source, destination = ids[:, begin : begin + most]
            for part in self._words:
                part[destination] = part[source]


class ElasticArena(Arena):
    """A pool whose memory comes and goes, a granule of ids at a time.

    A granule is a whole number of blocks in every part, so that it shares no
    block with its neighbours.
    """

    def __init__(
        self,
        parts: Sequence[torch.Tensor],
        place: AddressRange,
        memory: VirtualArena,
        ids_per_granule: int,
    ) -> None:
        """Take over a range that is all holes.

        Args:
            parts: as for `Arena`, views of `place`.
            place: the addresses of the pool.
            memory: what the range was reserved from.
            ids_per_granule: ids in a granule.

        Raises:
            ValueError: if a granule is no whole number of blocks.
        """
        super().__init__(parts)
        self._place = place
        self._memory = memory
        self._ids = ids_per_granule
        for part in parts:
            size = ids_per_granule * part.stride(0)
            if (part.data_ptr() - place.address) % memory.block_bytes or (
                size % memory.block_bytes
            ):
                raise ValueError(
                    f"granules of {size} bytes are no whole number of blocks of "
                    f"{memory.block_bytes}"
                )

    @property
    def granule_bytes(self) -> int:
        """Bytes of a granule over all parts."""
        return sum(self._ids * part.stride(0) for part in self.parts)

    def map(self, granules: Iterable[int]) -> Refusal | None:
        """Put memory, all zeros, behind granules, or change nothing."""
        granules = sorted(granules)
        refusal = self._memory.map(self._spans(granules))
        if refusal is None and not self._memory.clears:
            for first, count in _runs(granules):
                rows = slice(first * self._ids, (first + count) * self._ids)
                for part in self.parts:
                    part[rows].zero_()
        return refusal

    def unmap(self, granules: Iterable[int]) -> None:
        """Take the memory from granules, once the work issued so far is done."""
        self._memory.unmap(self._spans(granules))

    def _spans(self, granules: Iterable[int]) -> Iterator[ByteRange]:
        granules = list(granules)
        for part in self.parts:
            start = part.data_ptr() - self._place.address
            size = self._ids * part.stride(0)
            for granule in granules:
                first = start + granule * size
                yield ByteRange(self._place, first, first + size)


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy to a device without waiting for it."""
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)


def _in_words(part: torch.Tensor) -> torch.Tensor:
    """The same memory in 8 bytes each, if its rows allow it: faster to index."""
    places = (part.data_ptr(), part.stride(0), part.shape[1])
    if part.dtype != torch.int8 or part.stride(1) != 1:
        return part
    return part if any(place % _WORD for place in places) else part.view(torch.int64)


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ascending numbers as (first, count) of those that follow each other."""
    first = 0
    for i in range(1, len(numbers) + 1):
        if i == len(numbers) or numbers[i] != numbers[i - 1] + 1:
            yield numbers[first], i - first
            first = i
