# SPDX-License-Identifier: Apache-2.0
"""SGLang's own prefill/decode disaggregation: the plugin caches in prefill servers.

A prefill server sends the pages and the state of a prompt out of SGLang's pools, by
their ids; whose cache gave these out makes no difference.  A decode server keeps no
prefixes: it is served by SGLang alone, and both sides need pages of one size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from hybrid_plugin.config import HybridConfig
from hybrid_plugin.sglang.cache_kinds import kept_beside
from hybrid_plugin.sglang.layout import keeps_states_alone

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

KEEPS_STILL = (
    "move memory that SGLang's transfers have registered; set elastic to false, or "
    "leave it out."
)
"""What prefill servers have against elastic pools, to follow those words."""


def sends(view: Any) -> bool:
    """Whether a server computes prompts for others.

    Args:
        view: of its arguments.
    """
    return bool(view.disaggregation_mode == "prefill")


def reason_to_stay_idle(view: Any) -> str | None:
    """Why a decode server is SGLang's alone, a phrase; None for other servers.

    Args:
        view: of its arguments.
    """
    if view.disaggregation_mode != "decode":
        return None
    if view.disaggregation_decode_enable_radix_cache:
        return (
            "the prefix cache of decode servers is SGLang's own "
            "(--disaggregation-decode-enable-radix-cache)"
        )
    return "decode servers keep no prefixes (--disaggregation-mode decode)"


def obstacles(
    view: Any, options: HybridConfig, model: Any, *, windows: bool
) -> Iterator[str]:
    """Sentences about what the plugin does not serve in prefill servers.

    Args:
        view: of SGLang's arguments.
        options: of the plugin.
        model: SGLang's `ModelConfig`.
        windows: whether the model has a pool for attention with windows.
    """
    if not sends(view):
        return
    flags = {
        "stages of a pipeline": ("--pp-size", view.pp_size > 1),
        "prefills ahead of their decode server": (
            "--optimistic-prefill-attempts and --disaggregation-decode-allocation-"
            "policy",
            view.optimistic_prefill_attempts > 0,
        ),
        "servers that change their role": (
            "--enable-pd-role-switch",
            view.enable_pd_role_switch,
        ),
    }
    for name, (flag, is_given) in flags.items():
        if is_given:
            yield f"{name} are not served in prefill servers yet; drop {flag}."
    kept = kept_beside(model, windows=windows)
    kept += ["models without attention layers"] * keeps_states_alone(model)
    for name in kept:
        yield f"{name} are not served in prefill servers yet; serve without the plugin."
    if options.peers is not None:
        yield "peers is another way from server to server: leave it out."
    if options.verify_fraction:
        yield (
            "verify_fraction has a server ask itself, and nobody would decode that: "
            "leave it out in prefill servers."
        )
    if options.is_deterministic:
        yield "deterministic was not tested in prefill servers: leave it out."


def send_what_is_computed(parked: Iterable[Req]) -> None:
    """Have a paused prompt's pages sent once its pass is over, as a chunk's are.

    Args:
        parked: requests whose last pass ended before their prompts do.
    """
    for req in parked:
        req.tmp_end_idx = min(req.extend_end, len(req.origin_input_ids))
