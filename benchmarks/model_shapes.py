# SPDX-License-Identifier: Apache-2.0
"""Models that our classes run, and the engines' own of the same sizes.

Sizes are those of the published configurations; weights are dummies.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.drafts.sides import ENGINES
from benchmarks.prefix_models import COMMON


@dataclass(frozen=True)
class Class:
    """A model, and whose class is to run it."""

    folder: str
    """Of its configuration."""
    shape: Mapping[str, Any]
    small: Mapping[str, Any]
    """What is smaller where there is no GPU."""
    ours_in: tuple[str, ...] = ()
    """Engines with a class of their own, in which ours is asked for."""
    engines: tuple[str, ...] = ENGINES
    """That have a class for it: their own, or ours."""
    plugin: bool = True
    """Whether the plugin serves it; the engine's own prefix cache does otherwise."""
    kernels: str = "auto"
    """As the option of that name."""
    graphs: bool | None = None
    """As vLLM's option `prefill_graphs`: SGLang captures no prompts of our classes."""

    def options(self, engine: str) -> dict[str, Any]:
        """Of the plugin."""
        found: dict[str, Any] = {}
        if self.kernels != "auto":
            found["kernels"] = self.kernels
        if self.graphs is not None and engine == "vllm":
            found["prefill_graphs"] = self.graphs
        if engine not in self.ours_in:
            return found
        return found | {"models": list(self.shape["architectures"])}


@dataclass(frozen=True)
class Comparison:
    """Our class, and those of an engine that it is compared with."""

    ours: str
    others: tuple[str, ...]
    named: tuple[str, ...] = ()
    """What runs besides where it is named, compared likewise."""

    @property
    def compared(self) -> tuple[str, ...]:
        """All that ours may be compared with."""
        return *self.others, *self.named

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Each side of our class, and one that it is compared with."""
        for number, one in enumerate((self.ours, *self.named)):
            for other in (*self.others, *self.named[number:]):
                yield one, other

    def sides(self, engine: str, *, named: bool = False) -> tuple[str, ...]:
        """Those that an engine has a class for, ours first.

        Args:
            engine: its name.
            named: whether those are meant too that run only where they are named.
        """
        every = (self.ours, *(self.compared if named else self.others))
        return tuple(name for name in every if engine in CLASSES[name].engines)


_ATTENTION_OF_BAMBA = (9, 18, 27)
_SMALL = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_MAMBA_2 = {
    "mamba_n_heads": 128,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
_SMALL_MAMBA_2 = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 32}
_BAMBA = {
    "architectures": ["BambaForCausalLM"],
    "model_type": "bamba",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "attn_layer_indices": list(_ATTENTION_OF_BAMBA),
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    },
    **_MAMBA_2,
}
_GRANITE = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "hidden_size": 4096,
    # It has no experts: this is its MLP.
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "shared_intermediate_size": 14336,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "layer_types": [
        "attention" if n in _ATTENTION_OF_BAMBA else "mamba" for n in range(32)
    ],
    "rms_norm_eps": 1e-5,
    "position_embedding_type": "rope",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "attention_multiplier": 128**-0.5,
    **_MAMBA_2,
}
_JAMBA = {
    "architectures": ["JambaForCausalLM"],
    "model_type": "jamba",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    # 2 for 16, so that two engines fit one device.
    "num_experts": 2,
    "num_experts_per_tok": 2,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_dt_rank": 256,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "use_mamba_kernels": False,
    "rms_norm_eps": 1e-6,
}
_SMALL_JAMBA = {**_SMALL, "intermediate_size": 256, "mamba_dt_rank": 8}

_ALONE = "the engine alone"
OUR_BAMBA, GRANITE = "Bamba, our class", "Granite-4 in Bamba's sizes, the engine's"
GRANITE_ALONE = f"Granite-4 in Bamba's sizes, {_ALONE}"
_KEEPING, _EAGER = "states kept inside passes", "prompts without graphs"
KEEPING_BAMBA = f"{OUR_BAMBA}, {_KEEPING}"
EAGER_BAMBA = f"{KEEPING_BAMBA}, {_EAGER}"
OUR_JAMBA, THEIR_JAMBA = "Jamba, our class", "Jamba, the engine's"
JAMBA_ALONE = f"Jamba, {_ALONE}"
KEEPING_JAMBA = f"{OUR_JAMBA}, {_KEEPING}"
EAGER_JAMBA = f"{KEEPING_JAMBA}, {_EAGER}"
_BAMBA_CLASS = Class(
    "bamba", _BAMBA, {**_SMALL, **_SMALL_MAMBA_2, "intermediate_size": 256}
)
_GRANITE_CLASS = Class(
    "granite",
    _GRANITE,
    {**_SMALL, **_SMALL_MAMBA_2, "shared_intermediate_size": 256},
)
_JAMBA_CLASS = Class("jamba", _JAMBA, _SMALL_JAMBA)
_KEEPING_BAMBA = replace(_BAMBA_CLASS, kernels="ours", graphs=True)
_OUR_JAMBA = replace(_JAMBA_CLASS, ours_in=("vllm",))
_KEEPING_JAMBA = replace(_OUR_JAMBA, kernels="ours", graphs=True)
_WITHOUT: dict[str, Any] = {"graphs": False, "engines": ("vllm",)}
# SGLang has no class for it.
_THEIR_JAMBA = replace(_JAMBA_CLASS, engines=("vllm",))
CLASSES = {
    OUR_BAMBA: _BAMBA_CLASS,
    GRANITE: _GRANITE_CLASS,
    GRANITE_ALONE: replace(_GRANITE_CLASS, plugin=False),
    KEEPING_BAMBA: _KEEPING_BAMBA,
    EAGER_BAMBA: replace(_KEEPING_BAMBA, **_WITHOUT),
    OUR_JAMBA: _OUR_JAMBA,
    KEEPING_JAMBA: _KEEPING_JAMBA,
    EAGER_JAMBA: replace(_KEEPING_JAMBA, **_WITHOUT),
    THEIR_JAMBA: _THEIR_JAMBA,
    JAMBA_ALONE: replace(_THEIR_JAMBA, plugin=False),
}
COMPARISONS = {
    "bamba": Comparison(
        OUR_BAMBA, (GRANITE, GRANITE_ALONE), (KEEPING_BAMBA, EAGER_BAMBA)
    ),
    "jamba": Comparison(
        OUR_JAMBA, (THEIR_JAMBA, JAMBA_ALONE), (KEEPING_JAMBA, EAGER_JAMBA)
    ),
}


def write(one: Class, folder: Path, on_gpu: bool) -> None:
    """Write a model's configuration into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**COMMON, **one.shape, **({} if on_gpu else one.small)}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
