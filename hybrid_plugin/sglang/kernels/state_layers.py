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
from hybrid_plugin.engine.kernel_choice import (
    EVERY,
    Mixer,
    Phase,
    are_graphed,
    is_divided,
    reach,
)
from hybrid_plugin.mixers import flashinfer_rule
from hybrid_plugin.mixers.long_prefill import LongKernel
from hybrid_plugin.mixers.prefills import Prefills
from hybrid_plugin.sglang.kernels import model_class, passes
from hybrid_plugin.sglang.kernels.choice import (
    is_captured_as_it_is,
    library_of,
    mixer_of,
)
from hybrid_plugin.sglang.kernels.warm_up import few_and_many, long_ones
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
        self._longest = EVERY
        self._long: LongKernel | None = None
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
        prefill_graphs: bool | None = False,
    ) -> None:
        """Decide who runs the model's state layers.

        Args:
            model: SGLang's `ModelConfig`.
            option: `wanted_kernels` of `HybridConfig`.
            device_name: on which they run, as SGLang names it.
            round_states: as in `Prefills`.
            prefill_graphs: whether the layers are to be in SGLang's graphs of prefills;
                None if they may.

        Raises:
            ConfigError: if an option asks for what there is not.
        """
        hindrance = _hindrance(model, prefill_graphs is True)
        self._choose(model, option, device_name, round_states, hindrance)
        if prefill_graphs is False:
            return
        missing = self._missing_for_graphs()
        if missing is None:
            self.in_prefill_graphs = prefill_graphs or self._are_measured_in_graphs()
        elif prefill_graphs:
            raise ConfigError(missing)

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
        if mixer is Mixer.MODEL_CLASS and round_states:
            reason = _NOT_DETERMINISTIC
        if option == "ours" and reason is not None:
            raise ConfigError(f'the option "kernels" is "ours", {reason}')
        if mixer is None or reason is not None:
            return
        self._mixer = mixer
        self.round_states = round_states
        reaches = {
            phase: reach(
                option, mixer, phase, device.type, partial(library_of, mixer, phase)
            )
            for phase in (Phase.PREFILL, Phase.DECODE)
        }
        if all(reaches.values()):
            self._phases = frozenset(reaches)
            self._longest = reaches[Phase.PREFILL]
        if self.runs(mixer, Phase.PREFILL):
            self.interior = InteriorSnapshots(device)
            self._cold = device.type != "cpu"
        if mixer is Mixer.MODEL_CLASS:
            model_class.have_kept(self.interior)
        if self._phases:
            logger.info(
                "hybrid-plugin: its own kernels run %s of the %s layers%s.",
                " and ".join(sorted(self._phases, reverse=True)),
                _words(mixer),
                self._share(mixer),
            )

    def _share(self, mixer: Mixer) -> str:
        """Settle whose long prefills are; what of it a log is told."""
        if self._longest == EVERY:
            return ""
        words = (
            f"prefills of up to {self._longest} tokens, and those that keep states in "
            "the middle of a prompt"
        )
        if is_divided(mixer, self._longest, library_of(mixer, Phase.PREFILL)):
            self._long = flashinfer_rule.beyond(self._longest)
            words += flashinfer_rule.words(self._long)
        return f" ({words})"

    def _missing_for_graphs(self) -> str | None:
        """A sentence about what stands in the way of graphs of prefills."""
        if self.interior is None:
            return (
                'the option "prefill_graphs" needs our kernels in the prefill: set '
                '"kernels" to "ours", or leave it out.'
            )
        if self._mixer not in _IN_PREFILL_GRAPHS:
            return (
                f'the option "prefill_graphs" is on, and SGLang keeps the '
                f"{_words(self._mixer)} layers out of its graphs of prefills: leave it "
                f"out."
            )
        whole = _captures(GraphBackend.FULL)
        if not whole and not _captures(GraphBackend.BREAKABLE):
            return (
                'the option "prefill_graphs" is on, and SGLang captures none: use '
                "--cuda-graph-backend-prefill breakable, or leave the option out."
            )
        if whole and attention_backends()[0] == "triton":
            return (
                'the option "prefill_graphs" is on, and SGLang captures no whole '
                "prefill with Triton's attention: use --attention-backend fa3, or "
                "--cuda-graph-backend-prefill breakable."
            )
        return None

    def _are_measured_in_graphs(self) -> bool:
        mixers = frozenset() if self._mixer is None else frozenset({self._mixer})
        # Graphs of a whole prefill, which SGLang calls experimental, were not measured.
        return _captures(GraphBackend.BREAKABLE) and are_graphed("sglang", mixers)

    def runs(self, mixer: Mixer, phase: Phase) -> bool:
        """Whether our kernels run layers of this kind."""
        return mixer is self._mixer and phase in self._phases

    def run_prefill(self, mixer: Mixer, batch: Any, metadata: Any) -> bool:
        """Whether our kernels run a pass over prompts: all of its sequences, or none.

        Args:
            mixer: the kind of layer.
            batch: SGLang's `ForwardBatch` of the pass.
            metadata: its `ForwardMetadata`.
        """
        if not self.runs(mixer, Phase.PREFILL):
            return False
        if not passes.is_plain_prefill(batch, metadata):
            return False
        if self._longest == EVERY or passes.is_known(metadata):
            return True
        keeps = self.interior is not None and self.interior.are_ordered
        return keeps or batch.extend_num_tokens <= self._longest

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
        found = passes.prefills(
            metadata,
            batch,
            self.interior,
            round_states=self.round_states,
            long=self._long,
        )
        if self._cold:
            self._cold = False
            for dummies in few_and_many(found):
                run(dummies)
            if self._long is not None:
                tokens = batch.extend_num_tokens
                for dummies in long_ones(found, self._long, tokens):
                    run(dummies)
        return found


_NOT_OURS = 'and there are none for the state layers of this model: set it to "auto".'
_NOT_DETERMINISTIC = (
    "and deterministic was not tested with model classes of hybrid-plugin: leave it "
    "out."
)


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
