# SPDX-License-Identifier: Apache-2.0
"""Which models the pools can hold, found out twice.

*Before the configuration is changed*, from what it and the model's source tell: the
plugin then steps aside and vLLM runs as if the plugin were not installed.

*Once the model is built*, from the specs that its layers declare, which is certain.
By then vLLM has built the model for an engine without a prefix cache of its own, so
what remains is to remove the plugin's marks: vLLM plans and schedules the model as
it does with `--no-enable-prefix-caching`.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING

from hybrid_plugin.config import ConfigError
from hybrid_plugin.engine import untried
from hybrid_plugin.vllm import rings

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec

KINDS_WITH_POOLS = frozenset(
    {
        "FullAttentionSpec",
        "MLAAttentionSpec",
        "SlidingWindowSpec",
        "SlidingWindowMLASpec",
        "ChunkedLocalAttentionSpec",
        "MambaSpec",
    }
)
"""Names of vLLM's cache specs that `specs.to_pool_spec` knows a pool for, besides that
of rings, which are not served of every model."""

_NO_CACHE = frozenset(
    {"KVCacheSpec", "AttentionSpec", "EncoderOnlyAttentionSpec", "CrossAttentionSpec"}
)
"""Specs that say nothing about the decoder's cache."""

_SCALED_BEGINNINGS = ("nvfp4", "turboquant")
_SCALED_ENDS = ("_per_token_head",)
"""Of names of KV types in vLLM that have scales in the pages."""
_SHOWN_SCALES = "int8_per_token_head"
"""Of which answers behind hits were compared on a GPU."""


class UnservableError(ConfigError):
    """The model, not an option, asks for what the plugin has no pools for."""


class StockSpecs(dict[str, "KVCacheSpec"]):
    """Specs by layer of a worker on which the plugin stepped aside.

    vLLM pickles what a worker returns as it is, so the class and the reason reach
    the engine core.
    """

    def __init__(self, specs: Mapping[str, KVCacheSpec], reason: str) -> None:
        """Wrap `specs`; `reason` is a sentence."""
        super().__init__(specs)
        self.reason = reason

    def __reduce__(self) -> tuple[type[StockSpecs], tuple[dict[str, object], str]]:
        return StockSpecs, (dict(self), self.reason)


def obstacles(vllm_config: VllmConfig) -> Iterator[str]:
    """Sentences about what the model needs and the plugin has not, if known early."""
    model = vllm_config.model_config
    module = _module_of(vllm_config)
    kinds = _built_by(module)
    unknown = without_pools(kinds, module)
    if unknown:
        yield (
            f"{model.architecture} keeps caches of the kind {unknown[0]}, which is not "
            "supported yet; HYBRID_PLUGIN=0 leaves the model to vLLM."
        )
    elif rings.KIND in kinds and vllm_config.speculative_config is not None:
        yield rings.NO_DRAFTS
    if _is_misread(vllm_config):
        yield (
            "vLLM's attention on CPUs misreads KV of this type; drop --kv-cache-dtype."
        )
    if _has_untried_scales(vllm_config) and untried.is_refused(untried.SCALES):
        yield (
            "KV with scales beside it is served as int8_per_token_head alone; choose "
            "that or fp8 for --kv-cache-dtype."
        )


def _is_misread(vllm_config: VllmConfig) -> bool:
    """Whether the type of KV is one that the attention of a CPU does not claim to read.

    On GPUs vLLM chooses a backend that reads it, or refuses.  On a CPU it asks nobody,
    and answers are wrong, or the engine dies of a segmentation fault.  Latent attention
    reads the same types, though it claims none.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return False
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    kind = vllm_config.cache_config.cache_dtype
    of_model = str(vllm_config.model_config.dtype).removeprefix("torch.")
    backend = AttentionBackendEnum.CPU_ATTN.get_class()
    return kind != of_model and not backend.supports_kv_cache_dtype(kind)


def has_scales(vllm_config: VllmConfig) -> bool:
    """Whether pages of a GPU have a scale for each token and head."""
    from vllm.platforms import current_platform

    kind = vllm_config.cache_config.cache_dtype
    return kind.endswith(_SCALED_ENDS) and not current_platform.is_cpu()


def _has_untried_scales(vllm_config: VllmConfig) -> bool:
    """Whether pages of a GPU have scales of a kind that was not compared there."""
    from vllm.platforms import current_platform

    kind = vllm_config.cache_config.cache_dtype
    if kind == _SHOWN_SCALES:
        return False
    in_blocks = kind.startswith(_SCALED_BEGINNINGS) and not current_platform.is_cpu()
    return in_blocks or has_scales(vllm_config)


def unknown_kinds(module: str | None) -> list[str]:
    """Names of cache specs that a model's module constructs and nothing has pools for.

    Args:
        module: where vLLM finds the model's class; None if that is not known.
    """
    return without_pools(_built_by(module), module)


def without_pools(kinds: Set[str], module: str | None) -> list[str]:
    """Names, of those of cache specs, that nothing has pools for.

    Args:
        kinds: names of specs that a model's module constructs.
        module: its name.
    """
    served = {rings.KIND} if rings.are_served(module) else set()
    return sorted(kinds - KINDS_WITH_POOLS - _NO_CACHE - served)


def find_out(
    vllm_config: VllmConfig, specs: Callable[[], Mapping[str, KVCacheSpec]]
) -> str | None:
    """Why the built model cannot be served, a sentence; None if it can.

    Args:
        vllm_config: of a worker that has loaded the model.
        specs: gives the layers' specs at the page size that the configuration names.

    Raises:
        ConfigError: for an option of the plugin that does not suit the model.
    """
    from hybrid_plugin.vllm import context_parallel, page_size, planning
    from hybrid_plugin.vllm.speculation import serving

    if not vllm_config.scheduler_config.enable_chunked_prefill:
        return "vLLM switched chunked prefill off for this model."
    cache = vllm_config.cache_config
    before = cache.block_size
    try:
        page_size.choose(vllm_config)
        found = dict(specs())
        planning.make_groups(found, context_parallel.page_ranks(vllm_config))
        return serving.obstacle_of_layers(vllm_config, found) or rings.obstacle(
            vllm_config.compilation_config.static_forward_context,
            found,
            drafts=vllm_config.speculative_config is not None,
        )
    except UnservableError as error:
        return str(error)
    finally:
        cache.block_size = before


def reason_among(specs: Sequence[Mapping[str, KVCacheSpec]]) -> str | None:
    """Why the workers stepped aside, None if they did not.

    Args:
        specs: of every worker.

    Raises:
        ConfigError: if only some of them did.
    """
    reasons = [s.reason if isinstance(s, StockSpecs) else None for s in specs]
    if len(set(reasons)) > 1:
        raise ConfigError(
            "hybrid-plugin can serve the layers of some ranks only: "
            f"{next(filter(None, reasons))} Set HYBRID_PLUGIN=0 to serve without it."
        )
    return reasons[0] if reasons else None


def _module_of(vllm_config: VllmConfig) -> str | None:
    """Where vLLM finds the model's class, which is not imported yet."""
    model = vllm_config.model_config
    entry = model.registry.models.get(model.architecture)
    name = getattr(entry, "module_name", None)
    if name is None:
        name = getattr(getattr(entry, "model_cls", None), "__module__", None)
    return name


def _built_by(module: str | None) -> set[str]:
    """Names of cache specs that a model's module, or its package, constructs."""
    from vllm.v1 import kv_cache_interface

    kinds = {
        name
        for name, value in vars(kv_cache_interface).items()
        if isinstance(value, type) and issubclass(value, kv_cache_interface.KVCacheSpec)
    }
    return {name for name in called_in(_files(module)) if name in kinds}


def _files(module: str | None) -> list[Path]:
    """Of a module that is installed, or of its package."""
    found = importlib.util.find_spec(module) if module else None
    if found is None or found.origin is None:
        return []
    origin = Path(found.origin)
    in_package = origin.name == "__init__.py"
    files = sorted(origin.parent.rglob("*.py")) if in_package else [origin]
    return [file for file in files if file.suffix == ".py" and file.is_file()]


def called_in(files: Iterable[Path]) -> Iterator[str]:
    """Names of functions and classes that Python files call."""
    for file in files:
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Call):
                name = node.func
                if isinstance(name, ast.Name):
                    yield name.id
                elif isinstance(name, ast.Attribute):
                    yield name.attr
