# SPDX-License-Identifier: Apache-2.0
"""Configurations that tell SGLang which layers keep what.

SGLang pickles them by name, and unpickles in processes that may not have registered
anything yet: so a class is made when its name is looked up here.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from hybrid_models.catalogue import CATALOGUE
from hybrid_models.kit import Placed, StateTensor


@lru_cache
def config_class(model_type: str) -> type[Any]:
    """transformers' configuration of a type of model, with what SGLang asks.

    Args:
        model_type: of an entry of the catalogue.
    """
    base: Any = _base(model_type)

    class Config(base):
        """Properties that SGLang reads."""

        # What the plugin goes by: which kernels run, and how far they count.
        hybrid_plugin_model_class = True

        def __init__(self, **given: Any) -> None:
            # transformers would make one that leaves out the base's.
            super().__init__(**given)
            if getattr(self, "max_position_embeddings", None) is None:
                self.max_position_embeddings = _architecture(self).LONGEST

        @property
        def full_attention_layer_ids(self) -> list[int]:
            return list(_architecture(self).attention_layers(self))

        @property
        def linear_layer_ids(self) -> list[int]:
            return list(_architecture(self).state_layers(self))

        @property
        def mamba2_cache_params(self) -> Any:
            return _cache_params(self)

        @property
        def final_logit_softcapping(self) -> float | None:
            return _architecture(self).logit_cap(self)

    Config.__name__ = Config.__qualname__ = f"{model_type}_config"
    Config.__module__ = __name__
    return Config


def __getattr__(name: str) -> Any:
    model_type = name.removesuffix("_config")
    if name == model_type or all(e.model_type != model_type for e in CATALOGUE):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return config_class(model_type)


def placement(config: Any) -> Placed:
    """How a model lies on a rank, from its configuration and SGLang's arguments."""
    from sglang.srt.configs.mamba_utils import mamba2_state_dtype
    from sglang.srt.environ import envs

    types, dtype = mamba2_state_dtype(config), _dtype(config)
    conv = types.conv if envs.SGLANG_MAMBA_CONV_DTYPE.is_set() else dtype
    return Placed(_ranks(), dtype, conv, types.temporal)


def _base(model_type: str) -> type[Any]:
    import transformers
    from transformers.models.auto import configuration_auto

    names: Any = configuration_auto.CONFIG_MAPPING_NAMES  # type: ignore[attr-defined]
    entry = next(e for e in CATALOGUE if e.model_type == model_type)
    own = entry.load().CONFIG
    if own is not None:
        return own
    base: type[Any] = getattr(transformers, names[model_type])
    return base


def _architecture(config: Any) -> Any:
    names = config.architectures or ()
    entries = [e for e in CATALOGUE if e.model_type == config.model_type]
    found = next((e for e in entries if e.name in names), entries[0])
    return found.load()


def _ranks() -> int:
    """Ranks of this process's model; 1 where SGLang has not set them up yet."""
    from sglang.srt.runtime_context import get_parallel

    try:
        return int(get_parallel().attn_tp_size)
    except (AssertionError, RuntimeError):
        return 1


def _dtype(config: Any) -> torch.dtype:
    dtype = config.dtype
    if isinstance(dtype, torch.dtype):
        return dtype
    found: torch.dtype = getattr(torch, str(dtype or "bfloat16").split(".")[-1])
    return found


def _cache_params(config: Any) -> Any:
    """SGLang's `Mamba2CacheParams`; None without state layers.

    It knows windows of convolutions, all of one type, and one recurrent tensor with
    three dimensions.
    """
    from sglang.srt.configs.mamba_utils import (
        Mamba2CacheParams,
        Mamba2StateDType,
        Mamba2StateShape,
    )

    architecture, placed = _architecture(config), placement(config)
    layers = list(architecture.state_layers(config))
    if not layers:
        return None
    windows, recurrent = split(architecture.state_tensors(config, placed))
    temporal = (1, 1, 0) if recurrent is None else three_dimensions(recurrent.shape)
    # SGLang looks at the first window, so there is always one.
    shapes = [window.shape for window in windows] or [(1, 0)]
    width, inputs = shapes[0]
    shape = Mamba2StateShape(
        conv=shapes,
        temporal=temporal,
        intermediate_size=width,
        conv_dim=width,
        ssm_state_size=temporal[2],
        num_heads=temporal[0],
        head_dim=temporal[1],
        state_size=temporal[2],
        conv_kernel=inputs + 1,
    )
    types = Mamba2StateDType(
        conv=placed.conv_dtype,
        temporal=placed.state_dtype if recurrent is None else recurrent.dtype,
    )
    return Mamba2CacheParams(shape=shape, layers=layers, dtype=types)


def split(
    tensors: tuple[StateTensor, ...],
) -> tuple[list[StateTensor], StateTensor | None]:
    """The tensors that SGLang keeps as windows of convolutions, and the other one.

    Raises:
        ValueError: if there are several others.
    """
    windows = [tensor for tensor in tensors if tensor.is_conv]
    recurrent = [tensor for tensor in tensors if not tensor.is_conv]
    if len(recurrent) > 1:
        raise ValueError(
            f"SGLang has room for one recurrent state, this model has {len(recurrent)}"
        )
    return windows, recurrent[0] if recurrent else None


def three_dimensions(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """The shape with ones behind it, as SGLang keeps a recurrent state."""
    first, second, third = (*shape, 1, 1)[:3]
    return first, second, third
