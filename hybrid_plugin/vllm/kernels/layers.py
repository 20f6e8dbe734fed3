# SPDX-License-Identifier: Apache-2.0
"""A worker's state layers, and whose kernels run each of them."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from hybrid_plugin.config import ConfigError
from hybrid_plugin.device.draft_records import DraftRecords
from hybrid_plugin.engine.kernel_choice import (
    EVERY,
    TRITON,
    Mixer,
    Phase,
    is_divided,
    reach,
)
from hybrid_plugin.mixers import flashinfer_rule
from hybrid_plugin.mixers.long_prefill import LongKernel
from hybrid_plugin.mixers.state_pass import StatePass
from hybrid_plugin.vllm.kernels import draft_passes, passes, records
from hybrid_plugin.vllm.kernels.draft_passes import DraftCounts
from hybrid_plugin.vllm.kernels.fixed_shape import GraphLimits, PrefillTables
from hybrid_plugin.vllm.kernels.passes import DecodeSlots
from hybrid_plugin.vllm.kernels.records import RecordForm
from hybrid_plugin.vllm.kernels.verification_tables import VerificationTables

if TYPE_CHECKING:
    from hybrid_plugin.device.interior import InteriorSnapshots


@dataclass(frozen=True, slots=True)
class Kind:
    """A class of vLLM's layers that our kernels can run."""

    mixer: Mixer
    module: str
    """Beside this one: with `weights_of`, `run` and `warm_up`."""

    @property
    def adapter(self) -> Any:
        """That module."""
        return importlib.import_module(f"hybrid_plugin.vllm.kernels.{self.module}")


_LAYERS = "vllm.model_executor.layers.mamba"
KINDS: Mapping[str, Kind] = {
    f"{_LAYERS}.gdn.qwen_gdn_linear_attn.QwenGatedDeltaNetAttention": Kind(
        Mixer.GATED_DELTA_NET, "gated_delta_net"
    ),
    f"{_LAYERS}.gdn.kimi_gdn_linear_attn.KimiGatedDeltaNetAttention": Kind(
        Mixer.KDA, "kda"
    ),
    f"{_LAYERS}.mamba_mixer2.MambaMixer2": Kind(Mixer.MAMBA2, "mamba2"),
    f"{_LAYERS}.short_conv.ShortConv": Kind(Mixer.SHORT_CONV, "short_conv"),
    f"{_LAYERS}.linear.minimax_linear_attn.MiniMaxText01LinearAttention": Kind(
        Mixer.LIGHTNING, "lightning"
    ),
    f"{_LAYERS}.linear.bailing_linear_attn.BailingMoELinearAttention": Kind(
        Mixer.LIGHTNING, "lightning"
    ),
    "hybrid_models.vllm.states.StateLayer": Kind(Mixer.MODEL_CLASS, "model_class"),
}
"""By the classes' names.  A subclass may compute another thing, so it is not there."""

RECORDED = frozenset({Mixer.GATED_DELTA_NET, Mixer.KDA, Mixer.MAMBA2})
"""Whose layers' drafts can be recorded, with `record_form` in their module."""

_THEIRS = "gdn_prefill_backend"
"""Attribute of vLLM's gated delta nets: whose kernels prefill."""

_PLAIN = frozenset({Phase.PREFILL, Phase.DECODE})
"""What passes do with sequences that have no drafts."""

_OURS = "hybrid_plugin_kernels"
"""Attribute of a layer that has them, and of a builder."""
_TABLES = "hybrid_plugin_prefill_tables"
"""Attribute of a builder."""
_ALONE = "hybrid_plugin_alone"
"""Attribute of a builder: what `read_alone` says."""


class StateLayers:
    """The state layers of one engine, in one worker."""

    def __init__(
        self,
        layers: Mapping[str, Any],
        option: str,
        device_type: str,
        *,
        drafts: int = 0,
        recorded_rows: int = 0,
        round_states: bool = False,
        has_others: bool = False,
    ) -> None:
        """Decide whose kernels run each layer.

        Args:
            layers: the state layers, by name.
            option: `wanted_kernels` of `HybridConfig`.
            device_type: "cpu" or "cuda", as torch calls it.
            drafts: that a sequence verifies in a pass, at most.  Then ours run a layer
                always or never: they leave the inputs of convolutions elsewhere than
                vLLM's.
            recorded_rows: where passes record what the tokens of drafts do to a state,
                and leave none: sequences that verify in a pass, at most.  Then ours run
                all layers, whatever the option says.  0 where each token leaves a state
                in a column of its own.
            round_states: whether passes round running states as slots do, so that
                bits do not depend on where a sequence goes on.
            has_others: whether other layers keep something in slots, too, which no
                kernels of ours can run.

        Raises:
            ConfigError: if ours are demanded for a layer that they cannot run, or
                cannot record.
        """
        self.records: DraftRecords | None = None
        """Of the last pass; None where tokens leave states."""
        self.record_bytes = 0
        """Memory of the records, beside the pools."""
        self.interior: InteriorSnapshots | None = None
        """What the next pass keeps; None where passes keep nothing."""
        self.graphs: GraphLimits | None = None
        """Of graphs with prefills; None where vLLM captures none."""
        self.tables: list[PrefillTables] = []
        """What those read, of each kind of layer."""
        self.replayed = 0
        """Passes that replayed one of those."""
        self.wants_graphs: bool | None = False
        """Whether passes with prefills are to replay CUDA graphs; None if they may."""
        self.drafts = drafts
        self.round_states = round_states
        self._ours: dict[str, OurKernels] = {}
        self._count = len(layers) + has_others
        for name, layer in layers.items():
            kind = kind_of(layer)
            if kind is None and option == "ours":
                raise ConfigError(
                    f'the option "kernels" is "ours", and layer {name}, a '
                    f"{type(layer).__name__}, runs on vLLM's only. Set it to "
                    '"auto" or "engine".'
                )
            if kind is None:
                continue
            wanted = _PLAIN | (frozenset({Phase.VERIFY}) if drafts else frozenset())
            measured = {
                phase: reach(
                    option,
                    kind.mixer,
                    phase,
                    device_type,
                    partial(_theirs, layer, phase),
                )
                for phase in wanted
            }
            # Where drafts are verified, ours run a layer in every pass or in none.
            least = EVERY if drafts else 1
            every = all(tokens >= least for tokens in measured.values())
            if every or recorded_rows:
                beyond = measured[Phase.PREFILL]
                longest = EVERY if recorded_rows else beyond
                self._ours[name] = OurKernels(
                    layer, kind, wanted, self, longest, beyond
                )
        if recorded_rows:
            self._record(layers, recorded_rows)

    def _record(self, layers: Mapping[str, Any], rows: int) -> None:
        for name, layer in layers.items():
            ours = self._ours.get(name)
            if ours is None or ours.kind.mixer not in RECORDED:
                raise ConfigError(
                    f'the option "draft_states" is "replay", and there are no kernels '
                    f"for it for layer {name}, a {type(layer).__name__}. Leave it out."
                )
            device = ours.weights.convolution.device
            self.record_bytes += records.allocate(
                layer,
                ours.weights.convolution,
                ours.record_form,
                rows,
                1 + self.drafts,
            )
            self.records = self.records or DraftRecords(rows, device)

    @property
    def mixers(self) -> frozenset[Mixer]:
        """What runs on our kernels, wholly or in part."""
        return frozenset(ours.kind.mixer for ours in self._ours.values())

    @property
    def names(self) -> frozenset[str]:
        """Layers that run on our kernels, wholly or in part."""
        return frozenset(self._ours)

    @property
    def keep_interior(self) -> bool:
        """Whether all states can be kept in the middle of a prompt."""
        prefills = [o for o in self._ours.values() if Phase.PREFILL in o.phases]
        return bool(prefills) and len(prefills) == self._count

    @property
    def is_whole(self) -> bool:
        """Whether ours run every state layer, prefills and decodes."""
        whole = [o for o in self._ours.values() if o.phases >= _PLAIN]
        return bool(whole) and len(whole) == self._count

    @property
    def uncaptured(self) -> str | None:
        """The first layer of a model class of ours whose passes with prompts no CUDA
        graph can hold; None if there is none."""
        for name, ours in self._ours.items():
            own = ours.kind.mixer is Mixer.MODEL_CLASS
            if own and not ours.adapter.is_captured(ours.layer):
                return name
        return None

    def describe(self) -> str:
        """A sentence about what runs on our kernels, for a log."""
        if not self._ours:
            return "vLLM's kernels run the state layers."
        parts = sorted({ours.describe() for ours in self._ours.values()})
        return f"kernels of hybrid-plugin run {', '.join(parts)}."

    def most_verified(self, most: int) -> int:
        """Sequences of a pass that can verify drafts, of so many that there may be."""
        return most if self.records is None else min(most, len(self.records.tokens))

    def limit_graphs(self, limits: GraphLimits) -> None:
        """Say which passes with prefills may be those of graphs."""
        self.graphs = limits
        for tables in self.tables:
            tables.limits = limits

    def hang(self) -> None:
        """Have the layers' hooks find them."""
        for ours in self._ours.values():
            setattr(ours.layer, _OURS, ours)

    def fold_records(self) -> None:
        """Have what was recorded folded into the states, which are in place now."""
        if self.records is not None:
            recorded = [
                (ours.layer, ours.weights.convolution, ours.record_form)
                for ours in self._ours.values()
            ]
            self.records.fold_into(records.layers_of(recorded))

    def refresh(self) -> None:
        """Take what was computed of the layers' weights from them again."""
        for ours in self._ours.values():
            ours.refresh()

    def warm_up(self, most: int) -> None:
        """Compile the kernels that will serve, on padding.

        Args:
            most: sequences of a pass at most; kernels for many differ from those for
                few.
        """
        tried = set()
        for ours in self._ours.values():
            form = ours.form()
            if form not in tried:
                tried.add(form)
                device = ours.layer.kv_cache[0].device
                tries = [
                    *passes.paddings(
                        most, device, round_states=self.round_states, long=ours.long
                    )
                ]
                if self.drafts:
                    tries += draft_passes.paddings(
                        1 + self.drafts,
                        self.most_verified(most),
                        device,
                        recorded=self.records is not None,
                    )
                for state_pass in tries:
                    ours.adapter.warm_up(ours.layer, ours.weights, state_pass)
        if self.records is not None:
            self.records.recorded(torch.full_like(self.records.tokens, -1))
            self.records.fold()


class OurKernels:
    """What the hooks find on a layer that our kernels run."""

    def __init__(
        self,
        layer: Any,
        kind: Kind,
        phases: frozenset[Phase],
        all_layers: StateLayers,
        longest: int = EVERY,
        beyond: int = EVERY,
    ) -> None:
        """Serve a layer whose weights are loaded.

        Args:
            layer: of vLLM.
            kind: what it is.
            phases: of it that our kernels run.
            all_layers: of which it is one.
            longest: tokens of prompts in a pass, up to which our kernels run its
                prefill if it keeps no state in the middle of a prompt.
            beyond: tokens of prompts in a pass, up to which they were as fast as
                vLLM's.

        Raises:
            ConfigError: if the layer is not as our kernels know its kind.
        """
        self.layer = layer
        self.kind = kind
        self.phases = phases
        self.longest = longest
        library = _theirs(layer, Phase.PREFILL)
        self.is_divided = is_divided(kind.mixer, beyond, library)
        """Whether vLLM's kernel is faster in passes of more tokens of prompts."""
        self.long: LongKernel | None = None
        """What runs most of such passes where our kernels do; None for ours."""
        if self.is_divided:
            self.long = flashinfer_rule.beyond(beyond)
        self.adapter = kind.adapter
        self.weights = self.adapter.weights_of(layer)
        """As the mixer takes them."""
        self._all = all_layers

    @property
    def record_form(self) -> RecordForm:
        """What the record of its tokens is like."""
        form: RecordForm = self.adapter.record_form(self.layer, self.weights)
        return form

    @property
    def together(self) -> StateLayers:
        """All state layers of the engine."""
        return self._all

    @property
    def interior(self) -> InteriorSnapshots | None:
        """What the next pass keeps."""
        return self._all.interior

    @property
    def graphs(self) -> GraphLimits | None:
        """Of graphs with prefills."""
        return self._all.graphs

    @property
    def round_states(self) -> bool:
        """Whether passes round running states as slots do."""
        return self._all.round_states

    def refresh(self) -> None:
        """Take the weights from the layer again, to where CUDA graphs find them."""
        made = self.adapter.weights_of(self.layer)
        for name in (field.name for field in fields(made)):
            old, new = getattr(self.weights, name), getattr(made, name)
            if isinstance(new, torch.Tensor) and new.data_ptr() != old.data_ptr():
                old.copy_(new)

    def form(self) -> tuple[object, ...]:
        """Equal for layers that the same compiled kernels run."""
        states = self.layer.kv_cache
        tensors = [getattr(self.weights, field.name) for field in fields(self.weights)]
        shapes = [(t.shape, t.dtype) for t in tensors if isinstance(t, torch.Tensor)]
        strides = [(t.shape, t.stride(), t.dtype) for t in states]
        return self.kind, *shapes, *strides

    def describe(self) -> str:
        """The kind of layer and what of it is ours, for a log."""
        part = " and ".join(sorted(self.phases))
        if self.longest < EVERY:
            part += (
                f"; prefill of up to {self.longest} tokens, and where states are kept "
                "in the middle of a prompt"
            )
            if self.is_divided:
                part += flashinfer_rule.words(self.long)
        elif self.long is not None:
            part += (
                "; FlashInfer's runs most of prefills of more than "
                f"{self.long.beyond} tokens"
            )
        return f"{self.kind.mixer} ({part})"

    def serve(self, state_pass: StatePass) -> bool:
        """Whether ours run a pass: all of its sequences, or none.

        Sequences with one token run beside prefills go with those: both read and
        write the same states.  Where drafts are verified, ours run everything.
        """
        prefills = state_pass.prefills
        if prefills is None:
            return Phase.DECODE in self.phases
        tokens = state_pass.tokens - state_pass.decodes
        reached = tokens <= self.longest or prefills.boundary_slots is not None
        return reached and Phase.PREFILL in self.phases


def kind_of(layer: Any) -> Kind | None:
    """What a layer is; None if only vLLM's own kernels run such."""
    cls = type(layer)
    return KINDS.get(f"{cls.__module__}.{cls.__qualname__}")


def mixer_of(layers: Iterable[Any]) -> Mixer | None:
    """The mixer that all of some layers are of; None if there is none such."""
    kinds = {kind_of(layer) for layer in layers}
    kind = kinds.pop() if len(kinds) == 1 else None
    return None if kind is None else kind.mixer


def _theirs(layer: Any, phase: Phase) -> str:
    """The library of kernels that vLLM has for a layer."""
    return str(getattr(layer, _THEIRS, TRITON)) if phase is Phase.PREFILL else TRITON


def ours(layer: Any) -> OurKernels | None:
    """What runs a layer in place of vLLM's kernels; None if those do."""
    found: OurKernels | None = vars(layer).get(_OURS)
    return found


def all_of(vllm_config: Any) -> StateLayers | None:
    """The state layers of an engine; None if ours run none of them."""
    layers = vllm_config.compilation_config.static_forward_context.values()
    found = next((o for o in map(ours, layers) if o is not None), None)
    return None if found is None else found.together


def run(layer: Any, metadata: Any, *tensors: torch.Tensor) -> bool:
    """Run a layer's pass on our kernels; False if vLLM's are to.

    Args:
        layer: of vLLM.
        metadata: vLLM's, of the layer's pass; None where vLLM tries the model without
            states, of which our kernels have nothing to do.
        tensors: what the kind's `run` takes behind the pass.

    Raises:
        RuntimeError: for a pass that no hooked builder described.
    """
    found = ours(layer)
    if found is None:
        return False
    if metadata is None:  # where the engine's kernels serve too, it warms them up here
        return Phase.PREFILL in found.phases and found.longest == EVERY
    state_pass = passes.of(metadata)
    if not found.serve(state_pass):
        return False
    found.adapter.run(layer, found.weights, state_pass, *tensors)
    return True


def accepted(vllm_config: Any, tokens: torch.Tensor) -> None:
    """Note what was accepted of each sequence of a pass; see `DraftRecords`."""
    every = all_of(vllm_config)
    if every is not None and every.records is not None:
        every.records.accepted(tokens)


# ------------------------------------------------------- the builders of metadata


def built(builder: Any, common: Any, metadata: Any, counts: DraftCounts) -> None:
    """Describe the pass of which a builder of vLLM's has made metadata.

    Args:
        builder: vLLM's, of one group of layers.
        common: what it made it of.
        metadata: what it made.
        counts: what it was told about drafts.
    """
    found = next(_of_builder(builder), None)
    if found is None:
        return
    room = _room(builder, found.together)
    if isinstance(room, VerificationTables):
        state_pass = draft_passes.describe(
            common,
            counts,
            room,
            found.interior,
            _tables(builder, found.together),
            found.long,
        )
    else:
        state_pass = passes.describe(
            common,
            metadata,
            room,
            found.interior,
            round_states=found.round_states,
            tables=_tables(builder, found.together),
            long=found.long,
        )
    passes.put(metadata, state_pass)


def read_alone(builder: Any) -> bool:
    """Whether our kernels alone read what a builder of vLLM's makes of a pass.

    They run gated delta nets in every pass where drafts are verified, as long as they
    run them at all.

    Args:
        builder: vLLM's, of one group of layers.
    """
    known: bool | None = getattr(builder, _ALONE, None)
    if known is None:
        found = list(_of_builder(builder))
        known = len(found) == len(builder.layer_names) and all(
            one.together.drafts and one.kind.mixer is Mixer.GATED_DELTA_NET
            for one in found
        )
        setattr(builder, _ALONE, known)
    return known


def captures_prefills(builder: Any, common: Any) -> bool:
    """Whether vLLM captures a graph with prefills for layers that ours run.

    Args:
        builder: vLLM's, of one group of layers.
        common: the metadata of the pass that is captured.
    """
    found = next(_of_builder(builder), None)
    return (
        found is not None
        and found.graphs is not None
        and found.graphs.hold(common.num_reqs, common.num_actual_tokens)
    )


def rebuilt(builder: Any, source: Any, metadata: Any) -> None:
    """The same where vLLM made the metadata of another group's.

    Args:
        builder: of the group that it is for.
        source: the other group's.
        metadata: what it made.
    """
    found = next(_of_builder(builder), None)
    if found is not None:
        passes.share(source, metadata, _room(builder, found.together))


def _of_builder(builder: Any) -> Iterator[OurKernels]:
    layers = builder.vllm_config.compilation_config.static_forward_context
    for name in builder.layer_names:
        found = ours(layers[name])
        if found is not None:
            yield found


def _room(builder: Any, every: StateLayers) -> DecodeSlots | VerificationTables:
    room: DecodeSlots | VerificationTables | None = getattr(builder, _OURS, None)
    if room is None:
        config = builder.vllm_config
        most, device = config.scheduler_config.max_num_seqs, builder.device
        if every.drafts:
            width = 1 + every.drafts
            rows = every.most_verified(most)
            room = VerificationTables(rows, width, device, every.records)
        else:
            graphs = config.compilation_config.max_cudagraph_capture_size or 0
            room = DecodeSlots(max(most, graphs), device)
        setattr(builder, _OURS, room)
    return room


def _tables(builder: Any, every: StateLayers) -> PrefillTables | None:
    if every.graphs is None:
        return None
    tables: PrefillTables | None = getattr(builder, _TABLES, None)
    if tables is None:
        tables = PrefillTables(every.graphs, builder.device)
        every.tables.append(tables)
        setattr(builder, _TABLES, tables)
    return tables
