# SPDX-License-Identifier: Apache-2.0
"""The changes that the plugin makes to vLLM's own functions.

Those for speculative decoding are in `speculation.patches`.

Every wrapper looks at the engine's configuration and passes straight through
where the plugin is not active.  Each says what breaks without it (symptom),
why (cause), what it does (fix) and when it can be deleted.
"""

from __future__ import annotations

import copy
import functools
import importlib
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hybrid_plugin.config import ConfigError, switched_off_by_environment
from hybrid_plugin.engine.kernel_choice import Mixer
from hybrid_plugin.upstream.hookpoints import Contract, resolve
from hybrid_plugin.upstream.standing import untested
from hybrid_plugin.vllm import contracts
from hybrid_plugin.vllm.wrapping import WRAPPED, wrap, wrap_classmethod

if TYPE_CHECKING:
    from vllm.config import VllmConfig

HALF_LOADED = (
    "hybrid-plugin is loaded in the server but not in {where}: let the environment "
    "variable VLLM_PLUGINS name it in every process (vllm_hybrid), or set "
    "HYBRID_PLUGIN=0 to serve without it."
)

_ARGUMENTS = "vllm.engine.arg_utils"
_ENGINE_CORE = "vllm.v1.engine.core"
_APP = "vllm.entrypoints.launchers.app"
_INPUT = "vllm.v1.engine.input_processor"
_WITHOUT_A_CACHE = (
    "hybrid-plugin is inactive: %s vLLM serves this model without a prefix cache %s."
)
_NO_CONNECTOR = "Got kv_transfer_params, but no KVConnector found"
_ALLOCATING = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.attn_utils")


def apply() -> None:
    """Hook the configuration, and the engine core where it is imported already.

    Where this vLLM lacks something, what needs it is left alone: the configuration
    is checked before a hybrid model is served, and other models need none of it.
    """
    patch_config()
    if _ARGUMENTS in sys.modules and not contracts.problems(contracts.ARGUMENT_HOOKS):
        patch_arguments()
    if _ARGUMENTS in sys.modules and not contracts.problems(contracts.DEFAULT_HOOKS):
        patch_defaults()
    if _ENGINE_CORE in sys.modules and not contracts.problems(contracts.CORE_HOOKS):
        patch_engine()
    patch_platform()


def is_applied() -> bool:
    """Whether vLLM loaded the plugin in this process."""
    from vllm.config import VllmConfig

    return hasattr(VllmConfig.try_verify_and_update_config, WRAPPED)


def require(*groups: tuple[Contract, ...]) -> None:
    """Check hook points.

    Raises:
        ConfigError: naming each one that this vLLM moved.
    """
    found = [problem for group in groups for problem in contracts.problems(group)]
    if found:
        from vllm import __version__

        raise ConfigError(
            f"it does not fit vLLM {__version__}: {'; '.join(found)}. "
            "Install a version it supports, or set HYBRID_PLUGIN=0 to serve without it."
        )


def _platform_hooks() -> tuple[Contract, ...]:
    from vllm.platforms import current_platform

    return contracts.CPU_HOOKS if current_platform.is_cpu() else ()


def _attention_hooks() -> tuple[Contract, ...]:
    from vllm.platforms import current_platform

    return contracts.CPU_ATTENTION_HOOKS if current_platform.is_cpu() else ()


def _warn_if_untested() -> None:
    from vllm import __version__

    remark = untested("vllm", __version__)
    if remark is not None:
        from vllm.logger import init_logger

        init_logger("vllm.hybrid_plugin").warning("vLLM %s is %s.", __version__, remark)


# ------------------------------------------------------------------ the patches


def patch_config() -> None:
    """Symptom: vLLM configures a hybrid model for its own aligned blocks.

    Cause: it has no hook between parsing a configuration and deriving from it.
    Fix: decide on activation just before it derives.
    Delete when: vLLM lets a plugin amend a configuration.
    """
    if contracts.problems(contracts.CONFIG_HOOKS):
        from vllm.logger import init_logger

        init_logger("vllm.hybrid_plugin").warning(
            "hybrid-plugin is inactive: %s.",
            contracts.problems(contracts.CONFIG_HOOKS)[0],
        )
        return

    def wrapper(original: Callable[..., None], config: VllmConfig) -> None:
        model = config.model_config
        if model is not None and not getattr(model, "config_updated", False):
            from hybrid_plugin.vllm import activation, context_parallel

            if not switched_off_by_environment() and activation.is_candidate(
                config, activation.read_options(config)
            ):
                require(contracts.OPTION_HOOKS)
                require(_attention_hooks())
                if activation.keeps_states_alone(model):
                    require(contracts.DEFAULT_HOOKS)
            activation.activate(config)
            if activation.is_active(config):
                require(
                    contracts.ENGINE_HOOKS, contracts.WORKER_HOOKS, _platform_hooks()
                )
                if config.speculative_config is not None:
                    require(contracts.SPECULATION_HOOKS)
                if activation.read_options(config).peers is not None:
                    require(contracts.PEER_HOOKS)
                if context_parallel.page_ranks(config) > 1:
                    require(contracts.CONTEXT_PARALLEL_HOOKS)
                if activation.read_options(config).verify_fraction:
                    require(contracts.HIT_CHECK_HOOKS)
                _warn_if_untested()
                patch_engine()
                patch_sessions()
                if _APP in sys.modules:  # of what has an API
                    require(contracts.SAVED_SESSION_HOOKS)
                    patch_app()
        original(config)

    wrap("vllm.config:VllmConfig.try_verify_and_update_config", wrapper)


def patch_arguments() -> None:
    """Symptom: `system_snapshot_min_tokens` reads another template than the server's.

    Cause: what `--chat-template` gives stays in the API process.
    Fix: where that option is set, have the text travel with the configuration.
    Delete when: the engine's configuration carries the chat template.
    """

    def build(original: Callable[..., Any], args: Any) -> Any:
        from hybrid_plugin.vllm import activation

        engine_args = original(args)
        if not switched_off_by_environment():
            template = getattr(args, "chat_template", None)
            activation.carry_chat_template(engine_args, template)
        return engine_args

    owner, name = resolve(f"{_ARGUMENTS}:EngineArgs.from_cli_args")
    wrap_classmethod(owner, name, build)


def patch_defaults() -> None:
    """Symptom: a model with state layers alone is served without a prefix cache.

    Cause: vLLM caches such models only if a flag says so, because its own cache of them
    is experimental, and the configuration does not tell its default from a flag.
    Fix: where no flag is about prefix caching, note that for activation.
    Delete when: vLLM caches these models by default.
    """

    def settle(original: Callable[..., None], args: Any, model_config: Any) -> None:
        from hybrid_plugin.vllm import activation

        is_given = args.enable_prefix_caching is not None
        original(args, model_config)
        if not (is_given or args.enable_prefix_caching):
            activation.note_default_caching(args, model_config)

    wrap(contracts.CACHING_DEFAULT, settle)


def patch_engine() -> None:
    """Symptom: the cache is planned as one pool of equal blocks.

    Cause: planning is a function of the engine core, not a plug-in point (0.33
    has a builder, but its block count cannot express two pools).
    Fix: plan two pools, and report their capacity.
    Delete when: the builder may return pools of different counts.
    """

    def plan(
        original: Callable[..., Any],
        vllm_config: VllmConfig,
        kv_cache_specs: Any,
        available_memory: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        from hybrid_plugin.vllm import activation, planning

        if activation.is_active(vllm_config):
            return planning.plan(vllm_config, kv_cache_specs, available_memory)
        return original(vllm_config, kv_cache_specs, available_memory, *args, **kwargs)

    def report(
        original: Callable[..., None], vllm_config: VllmConfig, kv_cache_config: Any
    ) -> None:
        from hybrid_plugin.vllm import activation, planning

        if not activation.is_active(vllm_config):
            original(vllm_config, kv_cache_config)
            return
        tokens, sequences = planning.capacity(vllm_config, kv_cache_config)
        vllm_config.cache_config.kv_cache_size_tokens = tokens
        vllm_config.cache_config.kv_cache_max_concurrency = sequences

    wrap(f"{_ENGINE_CORE}:get_kv_cache_configs", plan)
    wrap(f"{_ENGINE_CORE}:update_kv_cache_capacity", report)
    _patch_utilities()
    _patch_adapters()
    _patch_specs()
    _patch_builder()


def patch_app() -> None:
    """Symptom: saved sessions have no endpoint, unless VLLM_PLUGINS names the plugin.

    Cause: vLLM loads plugins with endpoints only if they are named there, and who names
    one switches off all plugins that are not named.
    Fix: where the plugin serves the model, add ours behind theirs.
    Delete when: a plugin that serves the model may add endpoints.
    """

    def attach(original: Callable[..., None], app: Any, *args: Any) -> None:
        from hybrid_plugin.vllm import saved_sessions

        original(app, *args)
        saved_sessions.attach(app)

    wrap(f"{_APP}:attach_endpoint_plugins", attach)


def patch_sessions() -> None:
    """Symptom: a streaming-input session goes on from a state that is too far.

    Cause: under asynchronous scheduling a turn may end while the step behind its last
    token is running.  vLLM drops that step's token, but the step has changed the state.
    Fix: refuse such sessions, in the process that takes requests.  Synchronous
    scheduling serves them.
    Delete when: vLLM runs no step beyond the end of a session's turn.
    """

    def take(
        original: Callable[..., Any], processor: Any, *args: Any, **more: Any
    ) -> Any:
        from hybrid_plugin.vllm import activation

        if more.get("resumable"):
            activation.refuse_session(processor.vllm_config)
        return original(processor, *args, **more)

    wrap(f"{_INPUT}:InputProcessor.process_inputs", take)


def _patch_utilities() -> None:
    """Symptom: nobody but the engine core reaches the cache.

    Cause: a utility call names a method of the engine core, and has no registry.
    Fix: give it a method for orders about saved sessions.
    Delete when: a scheduler can take utility calls.
    """
    from hybrid_plugin.vllm import saved_sessions

    owner, name = resolve(f"{_ENGINE_CORE}:EngineCore")
    setattr(getattr(owner, name), saved_sessions.CALL, saved_sessions.take)


def _patch_adapters() -> None:
    """Symptom: an adapter loaded in place resumes from pages of the one before.

    Cause: requests name an adapter by name, number and path, and all of these stay.
    Fix: tell the cache, before requests with the new weights come.
    Delete when: a request tells one time that its adapter was loaded from another.
    """

    def add(original: Callable[..., Any], engine_core: Any, lora_request: Any) -> Any:
        if lora_request.load_inplace:
            _adapter_changed(engine_core, lora_request.lora_int_id, in_place=True)
        return original(engine_core, lora_request)

    def remove(original: Callable[..., Any], engine_core: Any, lora_id: int) -> Any:
        _adapter_changed(engine_core, lora_id, in_place=False)
        return original(engine_core, lora_id)

    wrap(f"{_ENGINE_CORE}:EngineCore.add_lora", add)
    wrap(f"{_ENGINE_CORE}:EngineCore.remove_lora", remove)


def _adapter_changed(engine_core: Any, number: int, *, in_place: bool) -> None:
    """Tell the cache, where it is ours."""
    from hybrid_plugin.vllm import activation

    if activation.is_active(engine_core.vllm_config):
        manager = engine_core.scheduler.kv_cache_manager
        manager.adapter_changed(number, in_place=in_place)


def patch_connector_warning() -> None:
    """Symptom: each request with `kv_transfer_params` is said to be served without.

    Cause: vLLM looks for a connector, which the scheduler does not need.
    Fix: drop that line of the log.
    Delete when: a scheduler can say that it reads the parameters itself.
    """
    core = logging.getLogger(_ENGINE_CORE)
    if not any(isinstance(one, _NotOfConnectors) for one in core.filters):
        core.addFilter(_NotOfConnectors())


class _NotOfConnectors(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(_NO_CONNECTOR)


def _patch_specs() -> None:
    """Symptom: a model that the pools cannot hold fails to start.

    Cause: what its layers cache is known once workers have built it, when the engine
    core's configuration has the plugin's scheduler in it already.
    Fix: where the workers stepped aside, remove the mark before anything is planned.
    Delete when: a model class declares its cache specs before it is built.
    """

    def collect(original: Callable[..., Any], executor: Any) -> Any:
        from hybrid_plugin.vllm import activation, servable

        specs = original(executor)
        reason = servable.reason_among(specs)
        if reason is not None:
            activation.step_aside(executor.vllm_config)
            activation.logger.warning(_WITHOUT_A_CACHE, reason, _way_out(executor))
        return specs

    wrap("vllm.v1.executor.abstract:Executor.get_kv_cache_specs", collect)


def _way_out(executor: Any) -> str:
    """How to get vLLM's own cache, the end of a sentence."""
    from hybrid_plugin.vllm import activation

    if activation.keeps_states_alone(executor.vllm_config.model_config):
        return "as it does by itself"  # with state layers alone
    return "now; set HYBRID_PLUGIN=0 to get its own"


def _patch_builder() -> None:
    """Symptom: 0.33 fails to group the layers, or captures graphs on one pool.

    Cause: grouping and the minimal cache for profiling CUDA graphs come from
    the platform's builder, before `get_kv_cache_configs` is reached.
    Fix: name our builder.
    Delete when: `patch_engine` is.
    """
    from vllm.platforms import current_platform

    platform = type(current_platform)
    if not hasattr(platform, "get_kv_cache_config_builder_cls"):
        return  # 0.32 has no builder

    def builder(original: Callable[..., str], vllm_config: VllmConfig) -> str:
        from hybrid_plugin.vllm import activation

        if activation.is_active(vllm_config):
            return "hybrid_plugin.vllm.builder.HybridConfigBuilder"
        return original(vllm_config)

    wrap_classmethod(platform, "get_kv_cache_config_builder_cls", builder)


def patch_platform() -> None:
    """Symptom: attention pages of 528 to 7808 tokens.

    Cause: `_align_hybrid_block_size` inflates them to the size of a state.
    Fix: choose the page size by the attention backends alone.
    Delete when: the alignment can be switched off.
    """
    from vllm.platforms.interface import Platform

    if not hasattr(Platform, "_align_hybrid_block_size"):
        return  # `require` reports it when a hybrid model is served

    def align(
        original: Callable[..., None], vllm_config: VllmConfig, backend_cls: Any
    ) -> None:
        from hybrid_plugin.vllm import activation, page_size

        if activation.is_active(vllm_config):
            page_size.choose(vllm_config)
        else:
            original(vllm_config, backend_cls)

    wrap_classmethod(Platform, "_align_hybrid_block_size", align)


@contextmanager
def pool_allocator(allocate: Callable[..., Any]) -> Iterator[None]:
    """Symptom: both pools would be laid over one allocation of one size.

    Cause: `allocate_kv_cache` asserts a single backing allocation.
    Fix: while a worker builds its cache, have `allocate` serve our configurations;
    both model runners.
    Delete when: a KV cache configuration may name several allocations.
    """
    from hybrid_plugin.vllm.planning import HybridKVCacheConfig

    modules = [importlib.import_module(name) for name in _ALLOCATING]
    originals = [module.allocate_kv_cache for module in modules]

    def serving(original: Callable[..., Any]) -> Callable[..., Any]:
        def allocate_kv_cache(config: Any, *args: Any, **kwargs: Any) -> Any:
            ours = isinstance(config, HybridKVCacheConfig)
            return (allocate if ours else original)(config, *args, **kwargs)

        return allocate_kv_cache

    for module, original in zip(modules, originals, strict=True):
        module.allocate_kv_cache = serving(original)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module, original in zip(modules, originals, strict=True):
            module.allocate_kv_cache = original  # type: ignore[attr-defined]


@contextmanager
def manager_factory(create: Callable[..., Any]) -> Iterator[None]:
    """Symptom: the scheduler builds vLLM's own KV cache manager.

    Cause: its class is a global of the scheduler's module.
    Fix: put `create` in its place while a scheduler is being built.
    Delete when: the manager's class can be named.
    """
    module = importlib.import_module("vllm.v1.core.sched.scheduler")
    original = module.KVCacheManager
    module.KVCacheManager = create  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.KVCacheManager = original  # type: ignore[attr-defined]


def patch_scales() -> None:
    """Symptom: a pass on KV with a scale for each token ends in an illegal access.

    Cause: Triton's attention makes views of the scales when it first sees a cache, and
    writes 1 into all of them; of elastic pools not all pages have memory.
    Fix: have it make the views of a tensor without memory, and lay them over the cache.
    Nothing is written: memory that a pool gets is zero, and of a page only what was
    written counts.
    Delete when: scales are not written before their tokens.

    Raises:
        ConfigError: for hook points that this vLLM moved.
    """
    require(contracts.SCALE_HOOKS)

    def ensure(original: Callable[..., None], attention: Any, kv_cache: Any) -> None:
        import torch

        if attention._k_scale_cache is not None:
            return
        storage = kv_cache.untyped_storage()
        room = torch.empty(storage.nbytes(), dtype=torch.int8, device="meta")
        shape = kv_cache.size(), kv_cache.stride(), kv_cache.storage_offset()
        original(attention, room.view(kv_cache.dtype).as_strided(*shape))
        scales = torch.empty(0, dtype=torch.float32, device=kv_cache.device)
        scales.set_(storage)
        for name in ("_k_scale_cache", "_v_scale_cache"):
            made = getattr(attention, name)
            view = made.size(), made.stride(), made.storage_offset()
            setattr(attention, name, scales.as_strided(*view))

    wrap(contracts.SCALES, ensure)


# ---------------------------------------------- patches for kernels of our own


def patch_batch_invariance() -> None:
    """Symptom: "VLLM batch_invariant mode is not supported for GDN_ATTN".

    Cause: the kernels of vLLM's state backends depend on the batch, so it refuses them.
    Fix: let the backends of layers pass that our kernels run; the engine core refuses
    a model with others.
    Delete when: the backends support it with any kernels, or ask whose they run.

    Raises:
        ConfigError: for hook points that this vLLM moved.
    """
    require(contracts.DETERMINISTIC_HOOKS)
    for name in contracts.STATE_BACKENDS:
        owner, backend = resolve(name)
        getattr(owner, backend).supports_batch_invariance = classmethod(_yes)


def _yes(cls: type) -> bool:
    return True


def patch_gated_norm() -> None:
    """Symptom: logprobs move with the number of tokens in a pass.

    Cause: vLLM's gated norm gives a program 1, 2 or 4 rows, by how many there are, and
    the order in which a row is summed follows from that.
    Fix: one row always, which is what it gives where there are few.
    Delete when: the norm does so where VLLM_BATCH_INVARIANT is set.

    Raises:
        ConfigError: for hook points that this vLLM moved.
    """
    require(contracts.DETERMINISTIC_HOOKS)
    module, name = resolve(contracts.GATED_NORM_ROWS)
    setattr(module, name, _one_row)


def _one_row(*_: Any) -> int:
    return 1


def patch_attention_tiles(longest: int) -> None:
    """Symptom: a sequence's logprobs differ where its pass also prefills another one.

    Cause: FlashAttention 3 chooses the keys of a tile, and with them the order of sums,
    by the most tokens that a sequence has in the pass: with heads of up to 64 it takes
    192 keys for decodes alone and 128 beside a prefill.  vLLM tells it the pass's
    number, in its batch-invariant mode too.
    Fix: the same number in every pass.
    Delete when: the number is a constant where VLLM_BATCH_INVARIANT is set.

    Args:
        longest: tokens that a sequence can have in a pass, at most.

    Raises:
        ConfigError: for hook points that this vLLM moved.
    """
    require(contracts.ATTENTION_HOOKS)

    def build(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        metadata = original(*args, **kwargs)
        metadata.max_query_len = longest
        return metadata

    wrap(contracts.ATTENTION_BUILD, build)


def patch_kernels(mixers: Iterable[Mixer], *, drafts: bool = False) -> None:
    """Hook the layers that our kernels run, once their weights are loaded.

    Args:
        mixers: what runs them.
        drafts: whether they verify drafts.

    Raises:
        ConfigError: for hook points that this vLLM moved.
    """
    on_cpu = bool(_platform_hooks())
    for mixer in mixers:
        require(contracts.KERNEL_HOOKS[mixer])
        if on_cpu:
            require(contracts.CPU_KERNEL_HOOKS.get(mixer, ()))
        for builder in contracts.BUILDERS[mixer]:
            _patch_builder_of_passes(builder)
        _PATCHES_OF_LAYERS[mixer]()
        if drafts and mixer is Mixer.GATED_DELTA_NET:
            _patch_gated_delta_net_with_drafts()
            _patch_norm_behind_drafts()


def patch_accepted(*, v2: bool) -> None:
    """Symptom: states stay behind the drafts that were accepted.

    Cause: how many they are is known to the model runner alone, once it has sampled.
    Fix: note the numbers, on the device, where it notes them itself.
    Delete when: `patch_kernels` is, with the layers' own replay.

    Args:
        v2: whether it is the V2 model runner.

    Raises:
        ConfigError: for hook points that this vLLM moved.
    """

    def after_v1(original: Callable[..., None], runner: Any, *args: Any) -> None:
        from hybrid_plugin.vllm.kernels import layers

        original(runner, *args)
        count = args[0].shape[0]
        accepted = runner.num_accepted_tokens.gpu[:count]
        # A row in the middle of its prompt may have sampled nothing that counts.
        layers.accepted(runner.vllm_config, accepted.clamp(min=1))

    def after_v2(
        original: Callable[..., None], state: Any, idx_mapping: Any, *args: Any
    ) -> None:
        from hybrid_plugin.vllm.kernels import layers

        original(state, idx_mapping, *args)
        accepted = state.num_accepted_tokens_gpu[idx_mapping]
        layers.accepted(state.vllm_config, accepted)

    require(contracts.REPLAY_HOOKS)
    if v2:
        wrap(contracts.V2_POSTPROCESS, after_v2)
    else:
        wrap(contracts.V1_AFTER_EXECUTION, after_v1)


def patch_prefill_graphs(mixers: Iterable[Mixer]) -> None:
    """Symptom: a pass with a short prompt takes as long as the host takes to launch it.

    Cause: vLLM captures whole passes with prefills only if every backend says that its
    own can be captured; those of state layers say no, and build metadata for captures
    of decodes alone.
    Fix: where the option `prefill_graphs` says so and our kernels run all state layers,
    describe graphs with prefills beside vLLM's own, build their metadata as for any
    pass, and replay them where that takes no longer than launching the pass.
    Delete when: vLLM's state layers can be captured with prefills, and its mode with
    graphs of both kinds can be named.

    Args:
        mixers: what runs the layers.

    Raises:
        ConfigError: for hook points that this vLLM moved.
    """
    require(contracts.PREFILL_GRAPH_HOOKS)

    def candidates(original: Callable[..., None], manager: Any) -> None:
        from hybrid_plugin.vllm.kernels import prefill_graphs

        original(manager)
        prefill_graphs.add(manager)

    def capture(
        original: Callable[..., Any], builder: Any, common_attn_metadata: Any
    ) -> Any:
        from hybrid_plugin.vllm.kernels import layers

        if layers.captures_prefills(builder, common_attn_metadata):
            return builder.build(0, common_attn_metadata)
        return original(builder, common_attn_metadata)

    def capture_and_time(original: Callable[..., None], *args: Any) -> None:
        from hybrid_plugin.vllm.kernels import graph_times

        graph_times.capture(original, *args)

    def find(
        original: Callable[..., Any],
        manager: Any,
        num_reqs: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        from hybrid_plugin.vllm.kernels import prefill_graphs

        return prefill_graphs.find(original, manager, num_reqs, *args, **kwargs)

    def replay(original: Callable[..., Any], manager: Any, desc: Any) -> Any:
        from hybrid_plugin.vllm.kernels import prefill_graphs

        prefill_graphs.count(manager, desc)
        return original(manager, desc)

    wrap(contracts.GRAPH_CANDIDATES, candidates)
    wrap(contracts.GRAPH_CAPTURE, capture_and_time)
    wrap(contracts.GRAPH_DISPATCH, find)
    wrap(contracts.GRAPH_REPLAY, replay)
    _patch_attention_in_graphs()
    for mixer in mixers:
        for builder in contracts.BUILDERS[mixer]:
            wrap(f"{builder}.build_for_cudagraph_capture", capture)


def _patch_attention_in_graphs() -> None:
    """Symptom: a graph of a longer pass than vLLM captures would write beyond its
    buffers.

    Cause: FlashAttention 3 divides the keys of a sequence among splits, by a number
    that it chooses for each pass; vLLM bounds it for passes up to its own largest
    graph.
    Fix: one split in passes beyond that and up to our largest graph: they have rows
    enough to fill the device.
    Delete when: vLLM bounds it in every pass that replays a graph.
    """
    require(contracts.ATTENTION_IN_GRAPHS)

    def build(
        original: Callable[..., Any],
        builder: Any,
        common_prefix_len: int,
        common_attn_metadata: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        from hybrid_plugin.vllm.kernels import layers

        given = (builder, common_prefix_len, common_attn_metadata, *args)
        found = layers.all_of(builder.vllm_config)
        longest = found.graphs.tokens if found and found.graphs else 0
        bound, splits = builder.max_cudagraph_size, builder.max_num_splits
        tokens = common_attn_metadata.num_actual_tokens
        if not (splits and bound is not None and bound < tokens <= longest):
            return original(*given, **kwargs)
        builder.max_cudagraph_size, builder.max_num_splits = longest, 1
        try:
            return original(*given, **kwargs)
        finally:
            builder.max_cudagraph_size, builder.max_num_splits = bound, splits

    wrap(contracts.ATTENTION_BUILD, build)


def _patch_builder_of_passes(builder: str) -> None:
    """Symptom: kernels are told nothing of chunks at multiples of 64 tokens.

    Cause: what vLLM's builder of metadata makes of a pass is for its own kernels.
    Fix: describe the pass once beside it, for each group of layers that ours run.
    Where only ours read it, in place of it: what a builder makes of drafts are many
    small launches, and a step of decoding may take as long as the host does.
    Delete when: a builder of a plugin's can be named for a kind of state layer, with
    the layers' own.
    """

    def build(
        original: Callable[..., Any],
        builder: Any,
        common_prefix_len: int,
        common_attn_metadata: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        from hybrid_plugin.vllm.kernels import draft_passes, layers

        if layers.read_alone(builder):
            metadata = _unread_metadata(common_attn_metadata.num_actual_tokens)
        else:
            metadata = original(
                builder, common_prefix_len, common_attn_metadata, *args, **kwargs
            )
        counts = draft_passes.counts_of(original, args, kwargs)
        layers.built(builder, common_attn_metadata, metadata, counts)
        return metadata

    def update(
        original: Callable[..., Any],
        builder: Any,
        metadata: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        from hybrid_plugin.vllm.kernels import layers

        if layers.read_alone(builder):
            made = copy.copy(metadata)
        else:
            made = original(builder, metadata, *args, **kwargs)
        layers.rebuilt(builder, metadata, made)
        return made

    wrap(f"{builder}.build", build)
    wrap(f"{builder}.update_block_table", update)


def _unread_metadata(tokens: int) -> Any:
    """Metadata of a gated delta net's pass of which our kernels read their own part.

    Args:
        tokens: of the pass.
    """
    owner, name = resolve(contracts.GDN_METADATA)
    counts = dict.fromkeys(contracts.GDN_COUNTS, 0)
    return getattr(owner, name)(**counts, num_actual_tokens=tokens)


def _patch_gated_delta_net() -> None:
    """Symptom: prompts pause at snapshots, and answers depend on where they paused.

    Cause: vLLM's kernels give the state at the end of a pass only, and lay their chunks
    from the pass's start.  What runs a layer is a method of its class.
    Fix: where the option `kernels` says so, run ours in place of the method, and on a
    CPU in place of the function that stands for it.
    Delete when: the kernels of a state layer can be named from outside vLLM.
    """

    def forward(
        original: Callable[..., None],
        layer: Any,
        mixed_qkv: Any,
        b: Any,
        a: Any,
        core_attn_out: Any,
    ) -> None:
        from hybrid_plugin.vllm.kernels import layers

        metadata = _metadata_of(layer)
        if not layers.run(layer, metadata, mixed_qkv, a, b, core_attn_out):
            original(layer, mixed_qkv, b, a, core_attn_out)

    wrap(contracts.GDN_FORWARD, forward)
    if _platform_hooks():
        wrap(contracts.GDN_FORWARD_ON_CPU, _gated_delta_net_on_cpu)


def _gated_delta_net_on_cpu(
    original: Callable[..., None],
    layer: Any,
    metadata: Any,
    mixed_qkv: Any,
    b: Any,
    a: Any,
    core_attn_out: Any,
    *rest: Any,
) -> None:
    """In place of the functions that run such a layer on a CPU."""
    from hybrid_plugin.vllm.kernels import layers

    if not layers.run(layer, metadata, mixed_qkv, a, b, core_attn_out):
        original(layer, metadata, mixed_qkv, b, a, core_attn_out, *rest)


def _patch_gated_delta_net_with_drafts() -> None:
    """Symptom: drafts are verified by vLLM's kernels where ours run the layer.

    Cause: where drafts are verified, other functions run the layer: on a CPU one that
    knows wider windows, on a GPU one that fuses the norm behind it.
    Fix: run ours in its place, and on a GPU the layer's norm behind them.  Ours read
    the gates where they are; the function would copy them first.
    Delete when: the kernels of a state layer can be named from outside vLLM.
    """

    def fused_norm(
        original: Callable[..., None],
        layer: Any,
        mixed_qkv: Any,
        b: Any,
        a: Any,
        output_gate: Any,
        core_attn_out: Any,
    ) -> None:
        from hybrid_plugin.vllm.kernels import layers

        metadata = _metadata_of(layer)
        tensors = (mixed_qkv, a, b, core_attn_out)
        if metadata is None or not layers.run(layer, metadata, *tensors):
            original(layer, mixed_qkv, b, a, output_gate, core_attn_out)
            return
        out = core_attn_out[: metadata.num_actual_tokens]
        layer._rms_norm_gated_cuda(out, output_gate[: len(out)], out)

    require(contracts.GDN_DRAFT_HOOKS)
    wrap(contracts.GDN_FUSED_NORM, fused_norm)
    if _platform_hooks():
        require(contracts.GDN_CPU_DRAFT_HOOKS)
        wrap(contracts.GDN_DRAFTS_ON_CPU, _gated_delta_net_on_cpu)


def _patch_norm_behind_drafts() -> None:
    """Symptom: each step with drafts copies the gates of every gated delta net.

    Cause: vLLM's norm takes rows that lie at one distance from each other.  Gates lie
    behind queries, keys and values in what one projection made, so it copies them.
    Fix: behind our kernels, run a norm of ours, which reads the gates where they are.
    What it does not compute stays with vLLM's.
    Delete when: vLLM's norm takes strides of tokens and of heads.
    """

    def norm(
        original: Callable[..., None], layer: Any, x: Any, output_gate: Any, out: Any
    ) -> None:
        from hybrid_plugin.vllm.kernels import gated_norm, layers

        is_ours = layers.ours(layer) is not None
        if not (is_ours and gated_norm.run(layer.norm, x, output_gate, out)):
            original(layer, x, output_gate, out)

    require(contracts.GDN_DRAFT_HOOKS)
    wrap(contracts.GDN_NORM, norm)


def _patch_kda() -> None:
    """Symptom: prompts of models with Kimi delta attention pause at snapshots.

    Cause: as of the gated delta net.  This layer is no operation of its own: between
    pieces of a CUDA graph it runs by a mark on its method.
    Fix: where the option `kernels` says so, run ours in place of the method, marked
    likewise.
    Delete when: the kernels of a state layer can be named from outside vLLM.
    """

    def forward(
        original: Callable[..., None],
        layer: Any,
        mixed_qkv: Any,
        g1: Any,
        g2: Any,
        beta: Any,
        core_attn_out: Any,
    ) -> None:
        from hybrid_plugin.vllm.kernels import layers

        metadata = _metadata_of(layer)
        if not layers.run(layer, metadata, mixed_qkv, g1, beta, g2, core_attn_out):
            original(layer, mixed_qkv, g1, g2, beta, core_attn_out)

    owner, mark = resolve(contracts.EAGER)
    wrap(contracts.KDA_FORWARD, getattr(owner, mark)(forward))


def _patch_mamba2() -> None:
    """Symptom: prompts of models with Mamba-2 pause at snapshots.

    Cause: as of the gated delta net, though vLLM's chunks lie where they should.
    Fix: where the option `kernels` says so, run ours in place of the method between
    the projections, on every platform.
    Delete when: the kernels of a state layer can be named from outside vLLM.
    """

    def forward(
        original: Callable[..., Any], layer: Any, projected_states: Any, output: Any
    ) -> Any:
        from hybrid_plugin.vllm.kernels import layers

        if layers.run(layer, _metadata_of(layer), projected_states, output):
            return None
        return original(layer, projected_states, output)

    wrap(contracts.MAMBA2_FORWARD, forward)


def _patch_lightning() -> None:
    """Symptom: prompts of models with linear attention pause at snapshots.

    Cause: as of the gated delta net, in two classes.
    Fix: where the option `kernels` says so, run ours in place of their methods for
    prefills and for decodes.
    Delete when: the kernels of a state layer can be named from outside vLLM.
    """

    def infer(
        original: Callable[..., Any],
        layer: Any,
        q: Any,
        k: Any,
        v: Any,
        kv_cache: Any,
        state_indices_tensor: Any,
        attn_metadata: Any,
    ) -> Any:
        from hybrid_plugin.vllm.kernels import layers

        out = v.new_empty(v.shape)
        if layers.run(layer, attn_metadata, q, k, v, out):
            return out.flatten(1)
        return original(layer, q, k, v, kv_cache, state_indices_tensor, attn_metadata)

    for method in contracts.LIGHTNING_FORWARD:
        wrap(method, infer)


def watch_weights(model: Any, written: Callable[[], None]) -> None:
    """Symptom: a trainer's worker extension loads weights, and state layers on our
    kernels decay as before, and files of the new weights count as of the old ones.

    Cause: it calls the model's `load_weights`, of which the worker hears nothing.
    Fix: have the model say so each time.
    Delete when: vLLM tells its workers whenever weights are loaded.

    Args:
        model: whose weights are loaded for the first time already.
        written: to be called when more of them are about to be.
    """
    load = model.load_weights

    @functools.wraps(load)
    def noted(*args: Any, **kwargs: Any) -> Any:
        written()
        return load(*args, **kwargs)

    model.load_weights = noted


def make_stage_buffers(runner: Any) -> None:
    """Symptom: with `--enforce-eager` and pipeline parallelism a CPU engine dies in its
    first step, in an assertion.

    Cause: the buffers for what the stage before sends are made when the model is tried,
    which the CPU worker does only where it compiles.
    Fix: make them before the engine serves.
    Delete when: vLLM's CPU worker makes them itself.

    Args:
        runner: the model runner of a stage.
    """
    from vllm.distributed.parallel_state import get_pp_group

    if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.dtype, device=runner.device
        )


def _patch_short_conv() -> None:
    """Symptom: prompts of models with short convolutions pause at snapshots.

    Cause: as of the gated delta net; the layer's methods, one for each platform, run
    its projections too.
    Fix: where the option `kernels` says so, run ours between the layer's projections.
    Delete when: the kernels of a state layer can be named from outside vLLM.
    """

    def forward(
        original: Callable[..., Any], layer: Any, hidden_states: Any, output: Any
    ) -> Any:
        from hybrid_plugin.vllm.kernels import layers

        metadata = _metadata_of(layer)
        # Without states vLLM tries the projections, which are its own.
        if metadata is not None and layers.run(layer, metadata, hidden_states, output):
            return None
        return original(layer, hidden_states, output)

    for method in contracts.SHORT_CONV_FORWARD:
        wrap(method, forward)


_PATCHES_OF_LAYERS: Mapping[Mixer, Callable[[], None]] = {
    Mixer.GATED_DELTA_NET: _patch_gated_delta_net,
    Mixer.KDA: _patch_kda,
    Mixer.MAMBA2: _patch_mamba2,
    Mixer.LIGHTNING: _patch_lightning,
    Mixer.SHORT_CONV: _patch_short_conv,
    Mixer.MODEL_CLASS: lambda: None,  # such layers are ours
}


def _metadata_of(layer: Any) -> Any:
    """vLLM's metadata of the pass that is running; None where it tries the model."""
    from vllm.forward_context import get_forward_context

    every = get_forward_context().attn_metadata
    return every.get(layer.prefix) if isinstance(every, dict) else None
