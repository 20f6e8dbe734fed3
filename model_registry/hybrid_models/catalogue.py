# SPDX-License-Identifier: Apache-2.0
"""The architectures of this package.

Importing it imports neither PyTorch nor an engine.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybrid_plugin.errors import ConfigError

if TYPE_CHECKING:
    from hybrid_models.architecture import Architecture


@dataclass(frozen=True, slots=True)
class Entry:
    """An architecture, as checkpoints name it."""

    name: str
    """In the field `architectures` of a configuration."""
    model_type: str
    """In the field of that name."""
    where: str
    """``module:class`` below `architectures`."""
    own_config: bool = False
    """Whether the module has the configuration of that type: transformers has none, or
    one that does not take what was published."""
    is_latent: bool = False
    """Whether its attention layers keep latent vectors."""
    has_states_alone: bool = False
    """Whether no layer of it attends."""

    def load(self) -> type[Architecture]:
        """Its class."""
        module, _, name = self.where.partition(":")
        found = importlib.import_module(f"hybrid_models.architectures.{module}")
        architecture: type[Architecture] = getattr(found, name)
        return architecture


CATALOGUE = (
    Entry("BambaForCausalLM", "bamba", "bamba:Bamba"),
    Entry(
        "GigaChat35ForCausalLM",
        "gigachat3_5",
        "gigachat35:GigaChat35",
        own_config=True,
        is_latent=True,
    ),
    Entry("JambaForCausalLM", "jamba", "jamba:Jamba"),
    Entry(
        "JetNemotronForCausalLM",
        "jet_nemotron",
        "jet_nemotron:JetNemotron",
        own_config=True,
    ),
    Entry(
        "KimiLinearForCausalLM",
        "kimi_linear",
        "kimi_linear:KimiLinear",
        is_latent=True,
    ),
    Entry("MiniMaxForCausalLM", "minimax", "minimax:MiniMax"),
    Entry("MiniMaxText01ForCausalLM", "minimax_text_01", "minimax:MiniMaxText01", True),
    Entry("MiniMaxM1ForCausalLM", "minimax_m1", "minimax:MiniMaxM1", True),
    Entry("OlmoHybridForCausalLM", "olmo_hybrid", "olmo_hybrid:OlmoHybrid"),
    Entry("Phi4FlashForCausalLM", "phi4flash", "phi4flash:Phi4Flash", own_config=True),
    Entry("Plamo2ForCausalLM", "plamo2", "plamo2:Plamo2", own_config=True),
    Entry(
        "RecurrentGemmaForCausalLM", "recurrent_gemma", "recurrent_gemma:RecurrentGemma"
    ),
    Entry("ZambaForCausalLM", "zamba", "zamba:Zamba"),
    Entry("Zamba2ForCausalLM", "zamba2", "zamba2:Zamba2"),
    Entry("ZayaForCausalLM", "zaya", "zaya:Zaya"),
    Entry(
        "xLSTMForCausalLM",
        "xlstm",
        "xlstm:XLSTM",
        own_config=True,
        has_states_alone=True,
    ),
)


BY_NAME: Mapping[str, Entry] = {entry.name: entry for entry in CATALOGUE}


def check_names(names: Iterable[str]) -> None:
    """Require what the option `models` names to be here.

    Raises:
        ConfigError: naming what is not.
    """
    unknown = [name for name in names if name not in BY_NAME]
    if unknown:
        raise ConfigError(
            f'the option "models" names {unknown[0]}, and hybrid-plugin has no such '
            f"model class; it has {', '.join(BY_NAME)}."
        )
