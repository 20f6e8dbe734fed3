# SPDX-License-Identifier: Apache-2.0
"""What SGLang and the plugin would do with a model, without loading weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from hybrid_plugin.engine import elastic_memory
from hybrid_plugin.engine.outlook import Outlook, Prospect
from hybrid_plugin.sglang.activation import FLAG, read_options


def foresee(model: str, flags: Sequence[str], cache_bytes: int) -> Outlook:
    """Resolve a server's arguments as SGLang does, and lay its cache out.

    Args:
        model: a folder with a config.json, or a name SGLang takes.
        flags: of `sglang.launch_server`; the plugin's own is added.
        cache_bytes: of both pools together, on one rank.
    """
    try:
        server_args = _resolve(model, flags)
    except (Exception, SystemExit) as error:
        text = _words(error)
        ours = text.startswith("hybrid-plugin")
        return Outlook(Prospect.REFUSED if ours else Prospect.FAILS, text)
    unknown = _unknown_architecture(server_args)
    if unknown is not None:
        return Outlook(Prospect.FAILS, unknown)
    view = _view(server_args)
    if view.radix_cache_backend != "hybrid":
        return Outlook(Prospect.LEFT_ALONE, _idle(server_args))
    try:
        return _sized(server_args, view.page_size, cache_bytes)
    except Exception as error:
        note = f"SGLang could not describe the model ({error!r})"
        return Outlook(Prospect.SERVED, note=note)


def _idle(server_args: Any) -> str:
    from hybrid_plugin.sglang.arguments import reason_to_stay_idle

    return reason_to_stay_idle(server_args) or 'the option "enabled" is false'


def _words(error: BaseException) -> str:
    """What went wrong; argparse has said it already, and ends with a number."""
    if isinstance(error, SystemExit) and not isinstance(error.code, str):
        return "SGLang does not take these flags; see above."
    return str(error) or repr(error)


def _resolve(model: str, flags: Sequence[str]) -> Any:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import prepare_server_args

    server_args = prepare_server_args(["--model-path", model, FLAG, *flags])
    server_args.resolve_once()
    publish(server_args, role="scheduler")
    return server_args


def _unknown_architecture(server_args: Any) -> str | None:
    """What SGLang says of a model that it has no class for; None for one it serves.

    It says so itself only once it loads the model.
    """
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader.utils import get_model_architecture

    try:
        get_model_architecture(ModelConfig.from_server_args(server_args))
    except ValueError as error:
        return f"SGLang cannot load this model: {error}"
    return None


def _view(server_args: Any) -> Any:
    from sglang.srt.arg_groups import overrides

    return overrides.resolved_view(server_args)


def _sized(server_args: Any, page_size: int, cache_bytes: int) -> Outlook:
    import torch
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader.utils import get_model_architecture
    from sglang.srt.runtime_context import attention_backends

    from hybrid_plugin.sglang import elastic, page_layout, pipeline, planning
    from hybrid_plugin.sglang.arguments import has_windows
    from hybrid_plugin.sglang.layout import make_layout
    from hybrid_plugin.sglang.log import logger
    from hybrid_plugin.sglang.speculation import draft_pages
    from hybrid_plugin.sglang.speculation.replay import passes
    from hybrid_plugin.sglang.speculation.scratch import drafts_per_step
    from hybrid_plugin.sglang.speculation.scratch_layout import scratch_layout

    model = ModelConfig.from_server_args(server_args)
    if has_windows(model):
        note = "SGLang divides the memory itself, by --swa-full-tokens-ratio"
        return Outlook(Prospect.SERVED, note=note)
    ranks = pipeline.layers_of_stages(model, get_model_architecture(model)[0])
    layers = pipeline.largest(ranks)
    attention_layers = len(layers.attention)
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    options = read_options()
    # Of what has no attention layers, SGLang's model knows no heads.
    token_bytes = _token_bytes(model) * attention_layers if attention_layers else 0
    drafts = drafts_per_step()
    draft = draft_keys = None
    if drafts:
        drafter = _drafter(server_args, model)
        draft = draft_pages.draft_group(drafter, page_size)
        draft_keys = draft_pages.draft_keys(drafter, page_size)
    backends = (*attention_backends(), *draft_pages.backends())
    packed = attention_layers > 0 and page_layout.can_pack(
        model, backends, token_bytes, draft, page_size, layers
    )
    lay_out = partial(
        make_layout,
        model,
        page_size=page_size,
        device_type=device_type,
        layers=layers,
        draft_keys=draft_keys,
        drafts=drafts,
    )
    limits = planning.limits_of(
        model,
        elastic_memory.limited(cache_bytes, options),
        device_type,
        elastic.hindrance(device_type)
        or elastic.hindrance_of_model(model)
        or pipeline.hindrance(ranks),
    )
    params = mambaish_config(model).mamba2_cache_params
    return Outlook.sized(
        lay_out(
            token_bytes=token_bytes,
            elastic=True,
            packed=packed,
            draft=draft,
            scratch=scratch_layout(
                params,
                device_type,
                limits.max_sequences,
                recorded=passes.is_wanted(options, model),
            ),
        ),
        cache_bytes,
        options,
        limits,
        logger,
        fixed_layout=lay_out(
            token_bytes=token_bytes + draft_pages.token_bytes(draft, page_size),
            elastic=False,
        ),
        beside=planning.scratch_bytes(model, cache_bytes, options, limits),
    )


def _drafter(server_args: Any, model: Any) -> Any:
    """As much of SGLang's `KVCacheConfigurator` as says what a draft model keeps."""
    from sglang.srt.model_executor.model_runner_components import spec_aux_hidden_state
    from sglang.srt.runtime_context import get_spec
    from sglang.srt.speculative.draft_parallel import legacy_draft_attn_tp_size
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    algorithm = SpeculativeAlgorithm.from_string(get_spec().speculative_algorithm)
    return SimpleNamespace(
        kv_cache_dtype=_kv_dtype(model),
        draft_attn_tp_size=legacy_draft_attn_tp_size(algorithm),
        spec_aux_config=spec_aux_hidden_state.resolve_spec_aux_hidden_state_config(
            server_args=server_args,
            model_config=model,
            spec_algorithm=algorithm,
            is_draft_worker=False,
        ),
    )


def _token_bytes(model: Any) -> int:
    """KV of one token in one attention layer, on one tensor-parallel rank."""
    from sglang.srt.runtime_context import get_parallel

    from hybrid_plugin.sglang.layout import is_latent

    if is_latent(model):
        elements = model.kv_lora_rank + model.qk_rope_head_dim
    else:
        heads = model.get_num_kv_heads(get_parallel().attn_tp_size)
        elements = heads * (model.head_dim + model.v_head_dim)
    return int(elements * _kv_dtype(model).itemsize)


def _kv_dtype(model: Any) -> Any:
    """The type that SGLang keeps KV in, as far as arguments tell it."""
    from sglang.srt.mem_cache.kv_cache_dtype import configure_kv_cache_dtype
    from sglang.srt.runtime_context import get_model

    _, dtype = configure_kv_cache_dtype(
        server_args_kv_cache_dtype=get_model().kv_cache_dtype,
        model=None,
        model_dtype=model.dtype,
        is_draft_worker=False,
        is_dflash=False,
        speculative_draft_attention_backend=None,
    )
    return dtype
