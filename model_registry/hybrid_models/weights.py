# SPDX-License-Identifier: Apache-2.0
"""Tensors of a checkpoint to parameters, by the engines' own loaders of each."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

QKV: Mapping[str, tuple[str, Any]] = {
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
}
GATE_UP: Mapping[str, tuple[str, Any]] = {
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
"""Modules of checkpoints that are parts of one module here."""
EXPERT_PARTS: Mapping[str, str] = {
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
}
"""Parts of an expert, as most checkpoints name them."""

DERIVED = ("rotary_emb.inv_freq",)
"""Ends of names of what some checkpoints hold and every engine computes."""

REQUIRED = "hybrid_models_required"
"""Attribute of parameters that no checkpoint may leave out, whatever their names."""

TILES = "hybrid_models_tiles"
"""Attribute of a `column` module some of whose parts every rank has whole: a function
from the dimension of the outputs, a tensor of the checkpoint, and which part it is or
None for all, to the tensor that the engine's loader cuts."""

EXPERTS = "hybrid_models_experts"
"""Attribute of a module of experts: an `ExpertLoader`."""


class ExpertLoader(Protocol):
    """Takes the tensors of experts."""

    def __call__(self, expert: int, part: str, kind: str, tensor: torch.Tensor) -> None:
        """Cut a tensor, and place it.

        Args:
            expert: its number.
            part: "gate", "up" or "down".
            kind: "weight", or what a quantised checkpoint has beside it.
            tensor: of the checkpoint.
        """


@dataclass(frozen=True, slots=True)
class Names:
    """How names in a checkpoint become names of parameters."""

    renames: Mapping[str, str] = field(default_factory=dict)
    """Parts of names, replaced in order."""
    stacked: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    """A module of the checkpoint, its module here, and which part of that it is; of
    several that fit, the first that the layer has, or else the module itself."""
    experts: Mapping[str, str] = field(default_factory=dict)
    """Parts of an expert in the checkpoint, and which they are: gate, up or down."""
    derived: tuple[str, ...] = ()
    """Ends of names of what the checkpoint holds and the model computes."""

    def renamed(self, name: str) -> str:
        """A name of the checkpoint with its parts replaced."""
        for old, new in self.renames.items():
            name = name.replace(old, new)
        return name

    def of(self, name: str, parameters: Container[str]) -> tuple[str, Any]:
        """The parameter of a tensor, and the part of it; None for all of it.

        Args:
            name: in the checkpoint.
            parameters: names of those that the model has.
        """
        name = self.renamed(name)
        fitting = [
            (name.replace(f".{old}.", f".{new}."), shard)
            for old, (new, shard) in self.stacked.items()
            if f".{old}." in name
        ]
        candidates = [*fitting, (name, None)]
        there = (found for found in candidates if found[0] in parameters)
        return next(there, (fitting or [(name, None)])[0])

    def is_derived(self, name: str) -> bool:
        """Whether a tensor is computed, and not loaded."""
        return name.endswith((*DERIVED, *self.derived))

    @property
    def packed(self) -> dict[str, list[str]]:
        """Modules here, and those of the checkpoint that each is made of."""
        found: dict[str, list[str]] = {}
        for old, (new, _) in self.stacked.items():
            parts = found.setdefault(new.rpartition(".")[2], [])
            parts.append(old.rpartition(".")[2])
        return found


DUMMY = "dummy"
"""The load format of engines that fill weights with anything."""


def load(
    model: nn.Module,
    tensors: Iterable[tuple[str, torch.Tensor]],
    names: Names,
    *,
    layers: int | None = None,
    is_whole: bool = True,
) -> set[str]:
    """Give each tensor to the parameter that it belongs to.

    Args:
        model: with parameters whose `weight_loader` cuts and checks.
        tensors: of a checkpoint, by name.
        names: of the architecture.
        layers: of the model; what checkpoints have of layers behind them, which draft
            tokens, is left out.
        is_whole: whether these are all tensors, as of a checkpoint: updates of weights
            come in parts.

    Returns:
        The names of the parameters that were given something.

    Raises:
        ValueError: for a tensor that no parameter takes, or a parameter that got none
            of a whole checkpoint.
    """
    loading = _Loading(model, names)
    for name, tensor in tensors:
        if not names.is_derived(name) and not _is_behind(name, layers):
            loading.give(name, tensor)
    if is_whole:
        loading.check()
    return loading.loaded


def update(
    model: Any, tensors: Iterable[tuple[str, torch.Tensor]], names: Names
) -> set[str]:
    """Give a model the weights of a checkpoint, or other ones for some of them.

    Both engines give a model lists of what a trainer sends, a bucket or one tensor at a
    time, and an iterator over a checkpoint, which must be whole.

    Args:
        model: a module with `config` and `has_weights`, which says whether it was given
            any before: those of a checkpoint, or dummies.
        tensors: by name.
        names: of the architecture.

    Returns:
        The names of the parameters that were given something.

    Raises:
        ValueError: as `load` does.
    """
    layers = model.config.num_hidden_layers
    is_whole = isinstance(tensors, Iterator) or not model.has_weights
    found = load(model, tensors, names, layers=layers, is_whole=is_whole)
    model.has_weights = True
    return found


def _is_behind(name: str, layers: int | None) -> bool:
    number = re.match(r"model\.layers\.(\d+)\.", name)
    return number is not None and layers is not None and int(number[1]) >= layers


class _Loading:
    """A checkpoint that is being loaded."""

    def __init__(self, model: nn.Module, names: Names) -> None:
        self.loaded: set[str] = set()
        self._names = names
        self._parameters = dict(model.named_parameters())
        self._modules = dict(model.named_modules())
        self._experts = {
            name: set[tuple[int, str]]()
            for name, module in self._modules.items()
            if hasattr(module, EXPERTS)
        }
        """What came of each module of experts: their numbers and parts."""

    def give(self, name: str, tensor: torch.Tensor) -> None:
        """Place one tensor.

        Raises:
            ValueError: if there is no parameter for it.
        """
        if self._give_to_experts(self._names.renamed(name), tensor):
            return
        target, shard = self._names.of(name, self._parameters)
        if target not in self._parameters:
            if target == "lm_head.weight":  # repeated: it is the embedding's
                return
            raise ValueError(f"the model has no parameter for {name} ({target})")
        parameter = self._parameters[target]
        tiles = getattr(self._modules.get(target.rpartition(".")[0]), TILES, None)
        if tiles is not None:
            tensor = tiles(getattr(parameter, "output_dim", 0), tensor, shard)
        _place(parameter, tensor, shard)
        self.loaded.add(target)

    def check(self) -> None:
        """Require a tensor for everything but the scales that engines give defaults.

        Raises:
            ValueError: naming what got none.
        """
        required = {
            name
            for name, parameter in self._parameters.items()
            if name.endswith(("weight", "bias")) or hasattr(parameter, REQUIRED)
        }
        missing = sorted(
            name
            for name in required - self.loaded
            if not any(name.startswith(f"{owner}.") for owner in self._experts)
        )
        for owner, came in self._experts.items():
            count = 1 + max((expert for expert, _ in came), default=0)
            missing += sorted(
                f"{owner}.{expert} ({part})"
                for expert in range(count)
                for part in set(self._names.experts.values())
                if (expert, part) not in came
            )
        if missing:
            raise ValueError(f"the checkpoint has nothing for {', '.join(missing[:3])}")

    def _give_to_experts(self, name: str, tensor: torch.Tensor) -> bool:
        """Place a tensor of an expert, or of all of them; False if it is none."""
        for owner, came in self._experts.items():
            if not name.startswith(f"{owner}."):
                continue
            for expert, part, kind, piece in self._pieces(
                name.removeprefix(f"{owner}."), tensor
            ):
                getattr(self._modules[owner], EXPERTS)(expert, part, kind, piece)
                if kind == "weight":
                    came.add((expert, part))
            self.loaded |= {
                name for name in self._parameters if name.startswith(f"{owner}.")
            }
            return True
        return False

    def _pieces(
        self, name: str, tensor: torch.Tensor
    ) -> Iterable[tuple[int, str, str, torch.Tensor]]:
        """Number, part, kind and tensor, of each expert and part in a tensor.

        Args:
            name: below the module of experts.
            tensor: of one expert, or ``[experts, ...]`` of all.

        Raises:
            ValueError: for a name that is no expert's.
        """
        single = re.fullmatch(r"(\d+)\.(\w+)\.(\w+)", name)
        if single is not None and single[2] in self._names.experts:
            yield int(single[1]), self._names.experts[single[2]], single[3], tensor
        elif name in ("gate_up_proj", "down_proj"):
            parts = ("gate", "up") if name == "gate_up_proj" else ("down",)
            for expert, own in enumerate(tensor):
                for part, piece in zip(parts, own.chunk(len(parts)), strict=True):
                    yield expert, part, "weight", piece
        else:
            raise ValueError(f"the model has no parameter for experts' {name}")


def _place(parameter: nn.Parameter, tensor: torch.Tensor, shard: Any) -> None:
    loader = getattr(parameter, "weight_loader", None)
    if loader is None:
        if parameter.shape != tensor.shape:
            raise ValueError(
                f"a tensor of shape {tuple(tensor.shape)} is no parameter of shape "
                f"{tuple(parameter.shape)}"
            )
        parameter.data.copy_(tensor)
    elif shard is None:
        loader(parameter, tensor)
    else:
        loader(parameter, tensor, shard)
