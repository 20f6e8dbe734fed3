# SPDX-License-Identifier: Apache-2.0
"""Whether the plugin serves an engine, decided once, from its configuration.

The scheduler class in the configuration is the mark of an active plugin: it
travels to every process of the engine, and the wrappers in `patches` look for
it, so an engine without the mark runs stock code throughout.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from hybrid_plugin.config import (
    ConfigError,
    HybridConfig,
    environment_options,
    switched_off_by_environment,
)
from hybrid_plugin.engine import host_memory
from hybrid_plugin.engine.refusals import cannot_serve
from hybrid_plugin.vllm import (
    context_parallel,
    deterministic,
    offloading,
    pipeline,
    ranks,
    servable,
    storable,
)
from hybrid_plugin.vllm.speculation import serving

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.engine.arg_utils import EngineArgs

# A name below "vllm" makes vLLM's log configuration show the lines.
logger = init_logger("vllm.hybrid_plugin")

OPTIONS_KEY = "hybrid_plugin"
CACHING_KEY = "hybrid_plugin_caching_by_default"
"""Key in the additional configuration, where no flag is about prefix caching and vLLM
would not cache the model."""
TEMPLATE_KEY = "hybrid_plugin_chat_template"
"""Key of the text of `--chat-template` in the additional configuration."""
SCHEDULER = "hybrid_plugin.vllm.scheduler.create_scheduler"
CPU_WORKER = "hybrid_plugin.vllm.cpu_worker.HybridCPUWorker"
GPU_WORKER = "hybrid_plugin.vllm.gpu_worker.HybridGPUWorker"


def read_options(vllm_config: VllmConfig) -> HybridConfig:
    """The options of `--additional-config`, and under them those of HYBRID_CONFIG.

    Raises:
        ConfigError: for options that are not a mapping or not valid.
    """
    return HybridConfig.from_mapping(given_options(vllm_config.additional_config))


def carry_chat_template(engine_args: EngineArgs, template: str | None) -> None:
    """Have the server's chat template travel to the engine core, if an option reads it.

    Args:
        engine_args: of the server.
        template: what `--chat-template` gives: a file, a name or the text itself.

    Raises:
        ConfigError: for options that are not a mapping.
    """
    extra = engine_args.additional_config
    wanted = given_options(extra).get("system_snapshot_min_tokens") is not None
    if template is None or not wanted or not isinstance(extra, dict):
        return
    from vllm.renderers.chat_utils import load_chat_template

    text = load_chat_template(template)
    engine_args.additional_config = {**extra, TEMPLATE_KEY: text}


def carried_chat_template(vllm_config: VllmConfig) -> str | None:
    """The text of the server's chat template, if it was given one and it is read."""
    extra = vllm_config.additional_config
    return extra.get(TEMPLATE_KEY) if isinstance(extra, dict) else None


def note_default_caching(engine_args: EngineArgs, model_config: ModelConfig) -> None:
    """Note that no flag switched prefix caching off, for a model that we may serve.

    Args:
        engine_args: of the server, where vLLM's default has.
        model_config: of its model.
    """
    extra = engine_args.additional_config
    if isinstance(extra, dict) and keeps_states_alone(model_config):
        engine_args.additional_config = {**extra, CACHING_KEY: True}


def given_options(extra: Any) -> dict[str, Any]:
    """The options of an additional configuration and of the environment together.

    What the command line says of an option counts.
    """
    options: Any = extra.get(OPTIONS_KEY, {}) if isinstance(extra, dict) else {}
    if not isinstance(options, dict):
        raise ConfigError(
            f'--additional-config "{OPTIONS_KEY}" takes a JSON object of options, got '
            f"{options!r}."
        )
    return environment_options() | options


def _carry_options(vllm_config: VllmConfig) -> None:
    """Have the options of the environment travel with the configuration.

    Engine cores and workers on other machines do not inherit the environment.
    """
    if isinstance(vllm_config.additional_config, dict) and environment_options():
        _set_options(vllm_config, given_options(vllm_config.additional_config))


def _size_host_memory(vllm_config: VllmConfig) -> tuple[str, ...]:
    """Let vLLM's flags for it say how large the host memory is, under the options.

    Returns:
        What is to be said once the plugin stands in for vLLM's connector.
    """
    offloaded = offloading.wanted(vllm_config)
    if offloaded is None:
        return ()
    given = given_options(vllm_config.additional_config)
    options = {"host_memory": offloaded.rank_bytes} | given
    _set_options(vllm_config, options)
    return tuple(offloaded.describe(options["host_memory"]))


def _set_options(vllm_config: VllmConfig, options: dict[str, Any]) -> None:
    vllm_config.additional_config = {
        **vllm_config.additional_config,
        OPTIONS_KEY: options,
    }


def is_active(vllm_config: VllmConfig) -> bool:
    """Whether the plugin was activated for this engine."""
    return bool(vllm_config.scheduler_config.scheduler_cls == SCHEDULER)


def activate(vllm_config: VllmConfig) -> None:
    """Decide, say so in one log line, and mark the configuration if active.

    Runs before vLLM derives anything from the model's architecture.

    Raises:
        ConfigError: for bad options, or when the plugin was asked for by name
            and cannot serve this configuration.
    """
    from vllm.platforms import current_platform

    options = read_options(vllm_config)
    idle = reason_to_stay_idle(vllm_config, options)
    if idle is not None:
        switched_off = switched_off_by_environment() or options.enabled is False
        if options.is_deterministic and not switched_off:
            raise cannot_serve(f"deterministic needs the plugin, and {idle}.")
        if options.peers is not None and not switched_off:
            raise cannot_serve(f"peers needs the plugin, and {idle}.")
        logger.info("hybrid-plugin is inactive: %s.", idle)
        return
    replaced = _size_host_memory(vllm_config)
    options = read_options(vllm_config)
    conflict = next(conflicts(vllm_config), None)
    if conflict is not None:
        refuse_if_demanded(options, conflict)
        logger.warning("hybrid-plugin is inactive: %s", conflict)
        return
    for given in options.outer_options:
        for obstacle in storable.obstacles(vllm_config, given):
            raise cannot_serve(obstacle)
    host_memory.check_packages(options, str(current_platform.device_type))
    ranks.settle_replicas(vllm_config, options)
    _mark(vllm_config)
    for line in replaced:
        logger.info("%s", line)
    logger.info("hybrid-plugin is active: it takes over prefix caching.")
    for line in _without_effect(vllm_config):
        logger.warning("hybrid-plugin: %s", line)


def _without_effect(vllm_config: VllmConfig) -> Iterator[str]:
    """Sentences about flags that are for vLLM's own cache alone."""
    if vllm_config.cache_config.num_gpu_blocks_override is not None:
        yield (
            "--num-gpu-blocks-override counts blocks of vLLM's own cache and has no "
            "effect; --kv-cache-memory-bytes limits the memory."
        )
    if vllm_config.observability_config.kv_cache_metrics:
        yield (
            "--kv-cache-metrics looks at vLLM's own cache and stays empty; "
            "hybrid_cache_* has the plugin's."
        )


def step_aside(vllm_config: VllmConfig) -> None:
    """Remove the marks from a configuration whose model turned out not to be served.

    vLLM's prefix caching stays off: the model was built for an engine without it.
    """
    if is_active(vllm_config):
        vllm_config.scheduler_config.scheduler_cls = None


def refuse_if_demanded(options: HybridConfig, reason: str) -> None:
    """Do not step aside where the plugin, or what it alone has, was asked for.

    Raises:
        ConfigError: with the `reason`, a sentence.
    """
    needed = options.is_deterministic or options.peers is not None
    if options.enabled or needed:
        raise cannot_serve(reason)


def refuse_session(vllm_config: VllmConfig) -> None:
    """Do not begin a streaming-input session that would go on from a wrong state.

    Raises:
        ConfigError: where the plugin is active and steps are scheduled ahead, or
            verify drafts.
    """
    if not is_active(vllm_config):
        return
    if vllm_config.speculative_config is not None:
        raise ConfigError(
            "hybrid-plugin serves streaming input only without drafts: start the "
            "server without --speculative-config."
        )
    if vllm_config.scheduler_config.async_scheduling:
        raise ConfigError(
            "hybrid-plugin serves streaming input only with synchronous scheduling: "
            "start the server with --no-async-scheduling."
        )


def reason_to_stay_idle(vllm_config: VllmConfig, options: HybridConfig) -> str | None:
    """Why this engine is not the plugin's business, a phrase; None if it is."""
    if switched_off_by_environment():
        return "HYBRID_PLUGIN=0 is set"
    if options.enabled is False:
        return 'the option "enabled" is false'
    if not is_candidate(vllm_config, options):
        return (
            "the model has no state layers, and vLLM caches its windows itself; set "
            'the option "enabled" to true to have the plugin serve it'
            if mixes_windows(vllm_config)
            else "the model has no state layers"
        )
    if not _may_cache(vllm_config):
        return "prefix caching is switched off"
    return None


def _may_cache(vllm_config: VllmConfig) -> bool:
    """Whether prefixes are cached, or would be if vLLM cached such models."""
    extra = vllm_config.additional_config
    by_default = isinstance(extra, dict) and extra.get(CACHING_KEY, False)
    return vllm_config.cache_config.enable_prefix_caching or bool(by_default)


def is_candidate(vllm_config: VllmConfig, options: HybridConfig) -> bool:
    """Whether the plugin serves models of this kind.

    A model with windows but no state layers is served on request only: vLLM's own cache
    can resume it at the end of any page that was computed, the plugin at snapshots.
    """
    model = vllm_config.model_config
    return (
        model.is_hybrid
        or keeps_states_alone(model)
        or (options.enabled is True and mixes_windows(vllm_config))
    )


def keeps_states_alone(model: ModelConfig) -> bool:
    """Whether a model has state layers and no attention layers, as Mamba has."""
    return bool(model.is_attention_free and model.has_inner_state)


def mixes_windows(vllm_config: VllmConfig) -> bool:
    """Whether some layers of a model look back further than others.

    Decided before there are layers, by the `layer_types` of the model's configuration;
    a model that expresses it in another way counts as one that does not.
    """
    text = vllm_config.model_config.hf_text_config
    exists = {
        "full_attention": True,
        "sliding_attention": bool(getattr(text, "sliding_window", None)),
        "chunked_attention": bool(getattr(text, "attention_chunk_size", None)),
    }
    kinds = set(getattr(text, "layer_types", None) or ())
    return kinds <= exists.keys() and sum(exists[kind] for kind in kinds) > 1


def conflicts(vllm_config: VllmConfig) -> Iterator[str]:
    """Sentences about what the plugin does not support, with the way out."""
    from vllm.platforms import current_platform

    parallel = vllm_config.parallel_config
    cache = vllm_config.cache_config
    model = vllm_config.model_config
    if not (current_platform.is_cpu() or current_platform.is_cuda()):
        yield f"it does not support the platform {current_platform.device_type!r} yet."
    connector = offloading.obstacle(vllm_config)
    if connector is not None:
        yield connector
    if model.enable_sleep_mode and not read_options(vllm_config).is_elastic:
        yield (
            "sleep mode needs elastic pools; leave the options out that fix them, or "
            "drop --enable-sleep-mode."
        )
    if parallel.pipeline_parallel_size > 1:
        yield from pipeline.obstacles(vllm_config, read_options(vllm_config))
    yield from context_parallel.obstacles(vllm_config, read_options(vllm_config))
    if parallel.use_ubatching:
        yield (
            "passes that are split in two keep no states inside; drop --enable-dbo and "
            "--ubatch-size."
        )
    if parallel.enable_elastic_ep:
        yield (
            "engines that join later have measured no memory; drop --enable-elastic-ep."
        )
    if model.is_encoder_decoder:
        yield "encoder-decoder models are not supported."
    if model.is_mm_prefix_lm:
        yield (
            "it would cut images whose tokens all see each other; serve text alone "
            "with --language-model-only."
        )
    if model.runner_type != "generate":
        yield f"it serves text generation, not the runner {model.runner_type!r}."
    if vllm_config.speculative_config is not None and keeps_states_alone(model):
        yield (
            "drafts for a model without attention layers are not supported yet; drop "
            "--speculative-config."
        )
    if getattr(cache, "use_replayssm", False):
        yield "ReplaySSM keeps no exact states; drop --use-replayssm."
    if getattr(getattr(vllm_config, "aux_output_config", None), "enabled", False):
        yield (
            "vLLM notes the experts of whole pages alone, and hits end within pages; "
            "drop --enable-return-routed-experts."
        )
    if not vllm_config.scheduler_config.enable_chunked_prefill:
        yield "it needs chunked prefill; drop --no-enable-chunked-prefill."
    if read_options(vllm_config).verify_fraction and parallel.data_parallel_size > 1:
        yield (
            "verify_fraction has an engine make steps of its own, and data-parallel "
            "ones make them together: leave one of them out."
        )
    yield from servable.obstacles(vllm_config)
    yield from serving.obstacles(vllm_config, read_options(vllm_config))
    if read_options(vllm_config).is_deterministic:
        yield from deterministic.obstacles(vllm_config)
    # Last, because vLLM names its own worker soon after: whoever asks again once a
    # configuration is complete is told the reason of the first time.
    if vllm_config.scheduler_config.scheduler_cls is not None:
        yield "it brings its own scheduler; drop --scheduler-cls."
    if parallel.worker_cls != "auto":
        yield "it brings its own worker; drop --worker-cls."


def _mark(vllm_config: VllmConfig) -> None:
    from vllm.platforms import current_platform

    _carry_options(vllm_config)
    offloading.take_over(vllm_config)
    cache = vllm_config.cache_config
    # With upstream's prefix caching off, every state layer takes column 0 of
    # its block table as its state slot: our slot ids are its block ids.
    cache.enable_prefix_caching = False
    cache.mamba_cache_mode = "none"
    cache.mamba_block_size = None
    vllm_config.scheduler_config.scheduler_cls = SCHEDULER
    vllm_config.parallel_config.worker_cls = (
        CPU_WORKER if current_platform.is_cpu() else GPU_WORKER
    )
