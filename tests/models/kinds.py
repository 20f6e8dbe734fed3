# SPDX-License-Identifier: Apache-2.0
"""Small checkpoints of every architecture in the catalogue, and their right answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hybrid_models import catalogue
from hybrid_models.catalogue import Entry

from tests.engines import slow_decay

Reference = Callable[[Sequence[int]], torch.Tensor]
"""Tokens to logits ``[T, vocabulary]``."""


@dataclass(frozen=True)
class Kind:
    """A checkpoint of one architecture."""

    name: str
    """Of the function of `slow_decay`, without its `write_`."""
    architecture: str
    brought_by: tuple[str, ...] = ()
    """Engines that have a class of their own: ours is asked for by an option there."""
    converted: str | None = None
    """What transformers calls the same model, where it takes it only converted."""
    has_reference: bool = False
    """Whether it is in `references`, because transformers has none."""
    engines: tuple[str, ...] = ("vllm", "sglang")
    """That serve it by our class; none where another kind differs in names only."""
    is_short: bool = False
    """Whether its states hold the last few tokens only."""

    @property
    def entry(self) -> Entry:
        """Of the catalogue."""
        return catalogue.BY_NAME[self.architecture]

    def write(self, folder: Path) -> Path:
        """Write it; returns the folder."""
        return Path(getattr(slow_decay, f"write_{self.name}")(folder))

    def config(self, checkpoint: Path) -> Any:
        """Its configuration."""
        from transformers import AutoConfig

        return (self._own_config() or AutoConfig).from_pretrained(checkpoint)

    def _own_config(self) -> Any:
        """The class of its configuration, where that is ours; otherwise None."""
        ours = catalogue.BY_NAME.get(self.architecture)
        return None if ours is None else ours.load().CONFIG

    def tensors(self, checkpoint: Path) -> Iterator[tuple[str, torch.Tensor]]:
        """What is in it, by name."""
        from safetensors import safe_open

        for file in sorted(checkpoint.glob("*.safetensors")):
            with safe_open(file, "pt") as found:
                for name in found.keys():  # noqa: SIM118 - it is no dict
                    yield name, found.get_tensor(name)

    def reference(self, checkpoint: Path) -> Reference:
        """What it must answer, by transformers in float32."""
        if self.has_reference:
            return _own(self.name, checkpoint)
        if self.converted is not None:
            converted = checkpoint / slow_decay.CONVERTED
            return logits_of(network(self.converted, converted))
        own = self._own_config()
        # In an engine's process `AutoConfig` has the engine's classes: without one of
        # ours, the network finds its own.
        given = {} if own is None else {"config": own.from_pretrained(checkpoint)}
        return logits_of(network(self.architecture, checkpoint, **given))


def _own(name: str, checkpoint: Path) -> Reference:
    from tests.models import references

    network = references.load(name, checkpoint)

    def logits(tokens: Sequence[int]) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = network(torch.tensor(list(tokens)))
        return found

    return logits


def network(architecture: str, checkpoint: Path, **given: Any) -> Any:
    """What transformers makes of a checkpoint, in float32."""
    import transformers

    cls: Any = getattr(transformers, architecture)
    return cls.from_pretrained(checkpoint, dtype=torch.float32, **given).eval()


def logits_of(model: Any) -> Reference:
    """Of a model of transformers."""

    def logits(tokens: Sequence[int]) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = model(torch.tensor([list(tokens)])).logits[0]
        return found

    return logits


KINDS = (
    Kind("bamba", "BambaForCausalLM"),
    Kind(
        "gigachat35",
        "GigaChat35ForCausalLM",
        ("sglang",),
        has_reference=True,
        engines=("vllm",),
    ),
    Kind("jamba", "JambaForCausalLM", ("vllm",)),
    Kind("jet_nemotron", "JetNemotronForCausalLM", ("sglang",), has_reference=True),
    Kind(
        "kimi_linear",
        "KimiLinearForCausalLM",
        ("vllm", "sglang"),
        engines=("vllm",),
    ),
    Kind("minimax", "MiniMaxForCausalLM", engines=()),
    Kind("minimax_text_01", "MiniMaxText01ForCausalLM", converted="MiniMaxForCausalLM"),
    Kind(
        "minimax_m1",
        "MiniMaxM1ForCausalLM",
        converted="MiniMaxForCausalLM",
        engines=(),
    ),
    Kind("olmo_hybrid", "OlmoHybridForCausalLM", ("vllm",)),
    Kind("phi4flash", "Phi4FlashForCausalLM", has_reference=True),
    Kind("plamo2", "Plamo2ForCausalLM", has_reference=True),
    Kind("recurrent_gemma", "RecurrentGemmaForCausalLM"),
    Kind("zamba", "ZambaForCausalLM"),
    Kind("zamba2", "Zamba2ForCausalLM", ("vllm",)),
    Kind("zaya", "ZayaForCausalLM", ("sglang",), is_short=True),
    Kind("xlstm", "xLSTMForCausalLM"),
)


STATES_ALONE = (
    Kind("falcon_mamba", "FalconMambaForCausalLM", engines=("sglang",)),
    Kind("mamba", "MambaForCausalLM", engines=("sglang",)),
    Kind("mamba2", "Mamba2ForCausalLM"),
)
"""Without attention, and served by the engines' own classes.  vLLM's CPU build has no
kernel for Mamba-1."""


def states_alone(engine: str) -> tuple[str, ...]:
    """Names of the kinds without attention that an engine serves on a CPU."""
    return tuple(kind.name for kind in STATES_ALONE if engine in kind.engines)


def served(engine: str) -> tuple[str, ...]:
    """Names of the kinds that an engine serves by our classes."""
    return tuple(kind.name for kind in KINDS if engine in kind.engines)


def find(name: str) -> Kind:
    """A kind by its name."""
    return next(kind for kind in (*KINDS, *STATES_ALONE) if kind.name == name)
