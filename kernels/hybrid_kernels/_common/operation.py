# SPDX-License-Identifier: Apache-2.0
"""What every operation's `prefill`, `update` and `verify` do alike.

An operation is a package with a `reference` and a `triton` module, and a class of
operands. Here the operands are checked, the output is made and the module is picked
that suits the device.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast

from hybrid_kernels._common.checks import check_index, check_shape, on_gpu, require
from hybrid_kernels._common.tables import Drafts, Sequences

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Operands:
    """The tensors of one call that are not tables; a subclass for each operation."""

    PER_TOKEN: ClassVar[tuple[str, ...]]
    """Fields with one row for each token."""
    DIMENSIONS: ClassVar[int]
    """Dimensions of `values` behind those that count tokens."""

    @property
    def values(self) -> torch.Tensor:
        """What the output is shaped like."""
        raise NotImplementedError

    def check(self, pool: torch.Tensor) -> None:
        """Require the operands to fit each other and the pool.

        Raises:
            ValueError: if they do not.
        """
        raise NotImplementedError

    def check_record(self, record: torch.Tensor, pool: torch.Tensor) -> None:
        """Require a record of drafts to suit the operands and the pool.

        Only called for operations whose `verify` takes a record.

        Raises:
            ValueError: if it does not.
        """
        raise NotImplementedError

    def as_single_drafts(self) -> Any:
        """The same tokens with a dimension for drafts behind the first."""
        return self._map(lambda x: x[:, None])

    def at(self, index: Any) -> Any:
        """Some of the tokens, by an index of their leading dimensions."""
        return self._map(lambda x: x[index].contiguous())

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        fields: Mapping[str, torch.Tensor | None] = {
            name: getattr(self, name) for name in self.PER_TOKEN
        }
        return replace(
            self, **{n: change(x) for n, x in fields.items() if x is not None}
        )


class Backend(Protocol):
    """A `reference` or `triton` module."""

    def prefill(self, operands: Any, sequences: Sequences, out: torch.Tensor) -> None:
        """Run packed sequences."""

    def steps(self, operands: Any, drafts: Drafts, out: torch.Tensor) -> None:
        """Run ``[N, L]`` or packed drafts, each from its parent's state."""


@functools.cache
def _module(package: str, name: str) -> Backend:
    return cast(Backend, importlib.import_module(f"{package}.{name}"))


def backend(package: str, tensor: torch.Tensor) -> Backend:
    """The module that runs an operation on a tensor's device.

    Triton is imported when the first tensor on a GPU is met.
    """
    return _module(package, "triton" if on_gpu(tensor) else "reference")


def prefill(
    package: str, operands: Operands, sequences: Sequences, out: torch.Tensor | None
) -> torch.Tensor:
    """Check and run packed sequences; `out`, or a new tensor."""
    _check_dimensions(operands, 1)
    operands.check(sequences.pool)
    sequences.check()
    result = _output(operands, out)
    backend(package, result).prefill(operands, sequences, result)
    return result


def update(
    package: str,
    operands: Operands,
    pool: torch.Tensor,
    slots: torch.Tensor,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """Check and run one token for each sequence; `out`, or a new tensor."""
    _check_dimensions(operands, 1)
    check_index("slots", slots, (operands.values.shape[0],))
    result = _output(operands, out)
    drafts = Drafts.advance(pool, slots)
    verify(package, operands.as_single_drafts(), drafts, result[:, None])
    return result


def verify(
    package: str, operands: Operands, drafts: Drafts, out: torch.Tensor | None
) -> torch.Tensor:
    """Check and run draft tokens; `out`, or a new tensor."""
    lead = 2 if drafts.cu_seqlens is None else 1
    _check_dimensions(operands, lead)
    operands.check(drafts.pool)
    drafts.check(tuple(operands.values.shape[:lead]))
    if drafts.record is not None:
        operands.check_record(drafts.record, drafts.pool)
    result = _output(operands, out)
    backend(package, result).steps(operands, drafts, result)
    return result


def _check_dimensions(operands: Operands, lead: int) -> None:
    expected, found = lead + operands.DIMENSIONS, operands.values.ndim
    require(found == expected, f"tokens have {found} dimensions, expected {expected}")


def _output(operands: Operands, out: torch.Tensor | None) -> torch.Tensor:
    values = operands.values
    result = values.new_empty(values.shape) if out is None else out
    check_shape("out", result, tuple(values.shape))
    return result
