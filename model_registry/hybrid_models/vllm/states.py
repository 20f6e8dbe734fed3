# SPDX-License-Identifier: Apache-2.0
"""A state layer of vLLM: slots of any tensors, and whatever runs on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from hybrid_models.kit import Mix, StateTensor
from hybrid_models.vllm.registration import STATES_OP
from hybrid_plugin.mixers.prefills import Prefills
from hybrid_plugin.mixers.state_pass import StatePass
from hybrid_plugin.vllm.kernels import model_class

try:
    from vllm.compilation.breakable_cudagraph import eager_break_during_capture
except ImportError:  # a vLLM whose graphs do not break

    def eager_break_during_capture(function: Any) -> Any:
        """Nothing breaks."""
        return function


_PASSES = "hybrid_models_passes"
"""Attribute of vLLM's context."""


class StateLayer(nn.Module, MambaBase):
    """Keeps `tensors` of each sequence, and has `mix` run passes on them.

    vLLM's kind `SHORT_CONV` is its plainest: what a pass does with slots, without
    tables for certain kernels.  Nothing of it looks at shapes.
    """

    mamba_type = MambaAttentionBackendEnum.SHORT_CONV

    def __init__(
        self,
        tensors: Sequence[StateTensor],
        mix: Mix,
        *,
        width: int,
        name: str,
        vllm_config: Any,
        captured: bool = False,
    ) -> None:
        """Enter the layer into vLLM's configuration as `name`.

        Args are those of `hybrid_models.kit.Kit.states`.

        Raises:
            ValueError: if there is such a layer already.
        """
        super().__init__()
        layers = vllm_config.compilation_config.static_forward_context
        if name in layers:
            raise ValueError(f"there are two layers {name}")
        layers[name] = self
        self.tensors, self.mix = tuple(tensors), mix
        self.width, self.name = width, name
        self.captured = captured
        """Whether a CUDA graph may hold its passes with prompts."""
        self.kv_cache = tuple(torch.tensor([]) for _ in tensors)

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        """Of each tensor, on this rank."""
        return tuple(tensor.shape for tensor in self.tensors)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        """Of each tensor."""
        return tuple(tensor.dtype for tensor in self.tensors)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Inputs ``[T, ...]`` to ``[T, width]``."""
        out = inputs[0].new_empty(inputs[0].shape[0], self.width)
        torch.ops.vllm.hybrid_models_states(list(inputs), out, self.name)
        return out

    def run(self, inputs: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """What the operation does: a pass, if there is one."""
        context = get_forward_context()
        if not isinstance(context.attn_metadata, dict):
            out.zero_()
            return
        metadata = context.attn_metadata[self.name]
        state_pass = model_class.pass_of(self, metadata)
        if state_pass is None:
            state_pass = _pass_in(context, metadata)
        out[state_pass.tokens :].zero_()  # of no rows, it is no kernel
        self.mix(state_pass, inputs, self.kv_cache, out)
        padding = state_pass.padding
        if padding is not None:  # a graph finds on the device where it begins
            out[: len(padding)].masked_fill_(padding[:, None], 0)


def _pass_in(context: Any, metadata: Any) -> StatePass:
    """The pass, made by the first of the layers whose metadata it is.

    Making it takes a few kernels.  It is kept with vLLM's context, of which each pass
    has a new one: metadata may stay while a graph is captured, and what was made before
    would not be made again when the graph runs.

    Args:
        context: vLLM's `ForwardContext`.
        metadata: as for `pass_of`.
    """
    made: dict[int, StatePass] | None = getattr(context, _PASSES, None)
    if made is None:
        made = {}
        setattr(context, _PASSES, made)
    if id(metadata) not in made:
        made[id(metadata)] = pass_of(metadata)
    return made[id(metadata)]


def pass_of(metadata: Any) -> StatePass:
    """A pass as the mixers take it.

    Args:
        metadata: vLLM's `ShortConvAttentionMetadata`.
    """
    decodes = metadata.num_decodes
    return StatePass(
        decodes=decodes,
        tokens=metadata.num_decode_tokens + metadata.num_prefill_tokens,
        decode_slots=_slots(metadata.state_indices_tensor_d[:, 0]),
        prefills=_prefills(metadata) if metadata.num_prefills else None,
    )


def _prefills(metadata: Any) -> Prefills:
    starts = metadata.query_start_loc_p
    return Prefills(
        cu_seqlens=starts,
        slots=_slots(metadata.state_indices_tensor_p[: metadata.num_prefills]),
        has_initial=metadata.has_initial_states_p,
        offsets=torch.zeros_like(starts[1:]),
    )


def _slots(blocks: torch.Tensor) -> torch.Tensor:
    """vLLM's padding is block 0, the mixers' is negative."""
    return torch.where(blocks > 0, blocks, -1)


@eager_break_during_capture  # type: ignore[untyped-decorator]
def _run_states(inputs: list[torch.Tensor], out: torch.Tensor, name: str) -> None:
    layer: StateLayer = get_forward_context().no_compile_layers[name]
    layer.run(inputs, out)


def _nothing(inputs: list[torch.Tensor], out: torch.Tensor, name: str) -> None:
    """Of the operation where only shapes count."""


direct_register_custom_op(
    op_name=STATES_OP.partition("::")[2],
    op_func=_run_states,
    mutates_args=["out"],
    fake_impl=_nothing,
)
