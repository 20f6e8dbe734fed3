# SPDX-License-Identifier: Apache-2.0
"""Who runs the state layers of the model that this process serves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from sglang.srt.model_executor.cuda_graph_config import Backend as GraphBackend
from sglang.srt.model_executor.cuda_graph_config import Phase as GraphPhase
from sglang.srt.model_executor.cuda_graph_config import check_cuda_graph_backend
from sglang.srt.runtime_context import attention_backends, get_exec

from hybrid_plugin.config import ConfigError
from hybrid_plugin.device.interior import InteriorSnapshots
from hybrid_plugin.engine.kernel_choice import Mixer, Phase, are_ours
from hybrid_plugin.mixers.prefills import Prefills
from hybrid_plugin.sglang.kernels.choice import (
    is_captured_as_it_is,
    library_of,
    mixer_of,
)
from hybrid_plugin.sglang.kernels.passes import prefills
from hybrid_plugin.sglang.kernels.warm_up import few_and_many
from hybrid_plugin.sglang.log import logger


class StateLayers:
    """Settled when pools are built, asked by the hooks of every layer.

    SGLang builds pools and runs layers in methods that see nothing of each other: the
    hooks in all of them share one of these.
    """

    def __init__(self) -> None:
        self._mixer: Mixer | None = None
        self._phases: frozenset[Phase] = frozenset()
        self._cold = False
        self.round_states = False
        """As in `Prefills`."""
        self.in_prefill_graphs = False
        """Whether SGLang captures them in its graphs of prefills."""
        self.interior: InteriorSnapshots | None = None
        """States that passes keep in the middle of a prompt; None where a pass can
        keep none, because SGLang's kernels run it."""

    def settle(
        self,
        model: Any,
        option: str,
        device_name: str,
        *,
        round_states: bool = False,
        prefill_graphs: bool = False,
    ) -> None:
        """Decide who runs the model's state layers.

        Args:
            model: SGLang's `ModelConfig`.
            option: `wanted_kernels` of `HybridConfig`.
            device_name: on which they run, as SGLang names it.
            round_states: as in `Prefills`.
            prefill_graphs: the option of that name.

        Raises:
            ConfigError: if an option asks for what there is not.
        """
        hindrance = _hindrance(model, prefill_graphs)
        self._choose(model, option, device_name, round_states, hindrance)
        if prefill_graphs:
            self._require_prefill_graphs()
        self.in_prefill_graphs = prefill_graphs

    def _choose(
        self,
        model: Any,
        option: str,
        device_name: str,
        round_states: bool,
        hindrance: str | None,
    ) -> None:
        device, found = torch.device(device_name), mixer_of(model)
        mixer, reason = (None, _NOT_OURS) if found is None else (found, hindrance)
        if option == "ours" and reason is not None:
            raise ConfigError(f'the option "kernels" is "ours", {reason}')
        if mixer is None or reason is not None:
            return
        self._mixer = mixer
        self.round_states = round_states
        phases = (Phase.PREFILL, Phase.DECODE)
        if all(
            are_ours(
                option, mixer, phase, device.type, partial(library_of, mixer, phase)
            )
            for phase in phases
        ):
            self._phases = frozenset(phases)
        if self.runs(mixer, Phase.PREFILL):
            self.interior = InteriorSnapshots(device)
            self._cold = device.type != "cpu"
        if self._phases:
            logger.info(
                "hybrid-plugin: its own kernels run %s of the %s layers.",
                " and ".join(sorted(self._phases, reverse=True)),
                _words(mixer),
            )

    def _require_prefill_graphs(self) -> None:
        if self.interior is None:
            raise ConfigError(
                'the option "prefill_graphs" needs our kernels in the prefill: set '
                '"kernels" to "ours", or leave it out.'
            )
        if self._mixer not in _IN_PREFILL_GRAPHS:
            raise ConfigError(
                f'the option "prefill_graphs" is on, and SGLang keeps the '
                f"{_words(self._mixer)} layers out of its graphs of prefills: leave it "
                f"out."
            )
        whole = _captures(GraphBackend.FULL)
        if not whole and not _captures(GraphBackend.BREAKABLE):
            raise ConfigError(
                'the option "prefill_graphs" is on, and SGLang captures none: use '
                "--cuda-graph-backend-prefill breakable, or leave the option out."
            )
        if whole and attention_backends()[0] == "triton":
            raise ConfigError(
                'the option "prefill_graphs" is on, and SGLang captures no whole '
                "prefill with Triton's attention: use --attention-backend fa3, or "
                "--cuda-graph-backend-prefill breakable."
            )

    def runs(self, mixer: Mixer, phase: Phase) -> bool:
        """Whether our kernels run layers of this kind."""
        return mixer is self._mixer and phase in self._phases

    def prefills(
        self, metadata: Any, batch: Any, run: Callable[[Prefills], object]
    ) -> Prefills:
        """The sequences of a pass that our kernels prefill.

        Args:
            metadata: SGLang's `ForwardMetadata` of the pass.
            batch: its `ForwardBatch`.
            run: runs the layer that asks.  Before the first pass of all, it is called
                with sequences that have no slots, to compile its kernels.
        """
        found = prefills(metadata, batch, self.interior, round_states=self.round_states)
        if self._cold:
            self._cold = False
            for dummies in few_and_many(found):
                run(dummies)
        return found


_NOT_OURS = 'and there are none for the state layers of this model: set it to "auto".'


_IN_PREFILL_GRAPHS = frozenset({Mixer.GATED_DELTA_NET, Mixer.KDA})
"""Layers that SGLang asks about before it breaks a graph."""


def _captures(backend: str) -> bool:
    """Whether SGLang captures prefills in graphs of this kind."""
    return bool(check_cuda_graph_backend(GraphPhase.PREFILL, backend))


def _words(mixer: Mixer | None) -> str:
    return "" if mixer is None else mixer.replace("_", " ")


def _hindrance(model: Any, prefill_graphs: bool) -> str | None:
    """What SGLang was asked for that our kernels do not do, to follow those words."""
    if get_exec().features.enable_mis:
        return "and they score no multiple items: drop --enable-mis."
    if not prefill_graphs and _captures(GraphBackend.FULL):
        # What a pass is to keep is known when it is launched, not when it is captured.
        return (
            "and they run outside of graphs of whole prefills: use "
            "--cuda-graph-backend-prefill breakable."
        )
    if _captures(GraphBackend.BREAKABLE) and is_captured_as_it_is(model):
        return (
            "and this model's graphs of prefills would repeat one pass's: use "
            "--cuda-graph-backend-prefill disabled."
        )
    return None
