# SPDX-License-Identifier: Apache-2.0
"""The memory of a pool, seen as rows: one row, or several parts of one, per id."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from hybrid_plugin.device.virtual_arena import (
    AddressRange,
    ByteRange,
    Refusal,
    VirtualArena,
)

if TYPE_CHECKING:
    from hybrid_kernels.state_copy import Parts

_FEW, _LARGE_ROW = 8, 16 << 20
"""So few ids, and rows of so many bytes, are copied one by one on a GPU."""
_COPY_BYTES = 16 << 20
"""Of one part that a CPU copies at once: it takes as much memory meanwhile."""
_WORD = 8


class Arena:
    """Bytes of one pool.

    A layer-major pool has one part per layer, one of packed pages or of slots a
    single one; page or slot `i` is row `i` of every part.
    """

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        """Take over the memory.

        Args:
            parts: `[ids, bytes]` int8 tensors with contiguous rows, of any sizes and
                any strides; ids and device must be equal.
        """
        shapes = {(part.dim(), part.shape[0], part.device) for part in parts}
        if len(shapes) != 1 or next(iter(shapes))[0] != 2:
            raise ValueError("the parts of an arena are matrices with equal row counts")
        self.parts = tuple(parts)
        self._words = [_in_words(part) for part in parts]
        self._device = parts[0].device
        self._on_gpu = _by_kernel(self._device)
        if self._on_gpu:
            self._described = self._describe()

    @property
    def capacity(self) -> int:
        """Number of ids, the reserved one included."""
        return self.parts[0].shape[0]

    def restore(self) -> Refusal | None:
        """Be all zeros, as at the start: the memory may have been away meanwhile.

        Where an engine lets memory go for a while, it keeps addresses and nothing of
        what lay there: neither the rows nor what describes them to the kernels.

        Returns:
            Why memory is missing, where it is ours to take again.
        """
        self._describe_again()
        for part in self.parts:
            part.zero_()
        return None

    def _describe_again(self) -> None:
        if self._on_gpu:
            self._described = self._describe()

    def zero(self, indices: Sequence[int]) -> None:
        """Clear ids, in order on the current stream."""
        if self._on_gpu:
            from hybrid_kernels import state_copy

            ids = torch.tensor(indices, dtype=torch.int64)
            state_copy.zero_parts(self._described, to_device(ids, self._device))
            return
        for index in indices:
            for part in self.parts:
                part[index].zero_()

    def copy(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy ids over others, in order on the current stream.

        A GPU copies all of them in one launch; a large row that lies side by side,
        or a few of any size, are plain copies, which the device's copy engine does
        faster (`benchmarks/results/state-moves-h200.md`).

        Args:
            sources: ids to read, none of which is written here.
            destinations: one for each, all different.
        """
        if self._on_gpu and not self._is_plain(len(sources)):
            from hybrid_kernels import state_copy

            ids = torch.tensor([sources, destinations], dtype=torch.int64)
            source, destination = to_device(ids, self._device)
            state_copy.fork_parts(self._described, source, destination)
        elif len(self.parts) == 1 or len(sources) == 1:
            self._copy_each(sources, destinations)
        else:
            self._copy_together(sources, destinations)

    def _is_plain(self, count: int) -> bool:
        """Whether a GPU copies so many ids faster one by one."""
        if len(self.parts) > 1:
            return False
        return count <= _FEW or self.parts[0].shape[1] >= _LARGE_ROW

    def _describe(self) -> Parts:
        """What the kernels read; they are compiled here, not when first needed."""
        from hybrid_kernels import state_copy

        described = state_copy.Parts(self.parts)
        nowhere = torch.full((1,), -1, dtype=torch.int64, device=self._device)
        state_copy.fork_parts(described, nowhere, nowhere)
        state_copy.zero_parts(described, nowhere)
        return described

    def _copy_each(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        # A slot is large enough to be copied alone, without memory beside it.
        for source, destination in zip(sources, destinations, strict=True):
            for part in self.parts:
                part[destination].copy_(part[source])

    def _copy_together(
        self, sources: Sequence[int], destinations: Sequence[int]
    ) -> None:
        # Pages are many and small.
        ids = torch.tensor([sources, destinations], dtype=torch.int64)
        for part in self._words:
            most = max(_COPY_BYTES // (part.shape[1] * part.itemsize or 1), 1)
            for begin in range(0, len(sources), most):
                source, destination = ids[:, begin : begin + most]
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
        self._mapped: set[int] = set()
        """Granules that have memory, or get it back."""
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

    @property
    def memory(self) -> VirtualArena:
        """What its granules are backed from, which other pools may share."""
        return self._memory

    def map(self, granules: Iterable[int]) -> Refusal | None:
        """Put memory, all zeros, behind granules, or change nothing."""
        granules = sorted(granules)
        refusal = self._memory.map(self._spans(granules))
        if refusal is not None:
            return refusal
        if not self._memory.clears:
            first = (granule * self._ids for granule in granules)
            self.zero([id for start in first for id in range(start, start + self._ids)])
        self._mapped.update(granules)
        return None

    def unmap(self, granules: Iterable[int]) -> None:
        """Take the memory from granules, once the work issued so far is done."""
        granules = list(granules)
        self._memory.unmap(self._spans(granules))
        self._mapped.difference_update(granules)

    def release(self) -> int:
        """Give all memory back to the system, contents and all, until `restore`.

        Returns:
            Bytes that went, those of other pools that were held and not mapped too.
        """
        self._memory.unmap(self._spans(self._mapped))
        return self._memory.trim()

    def restore(self) -> Refusal | None:
        """Put memory, all zeros, where there was some, or change nothing."""
        self._describe_again()
        return self.map(self._mapped)

    def _spans(self, granules: Iterable[int]) -> Iterator[ByteRange]:
        granules = list(granules)
        for part in self.parts:
            start = part.data_ptr() - self._place.address
            size = self._ids * part.stride(0)
            for granule in granules:
                first = start + granule * size
                yield ByteRange(self._place, first, first + size)


def _by_kernel(device: torch.device) -> bool:
    """Whether `hybrid_kernels` moves rows on this device."""
    return device.type != "cpu"


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
