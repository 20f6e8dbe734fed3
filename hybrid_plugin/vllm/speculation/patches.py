# SPDX-License-Identifier: Apache-2.0
"""What vLLM gets wrong where drafts are verified with a state for each of them.

All of it is wrong without the plugin too; it is mended in the workers of engines that
the plugin serves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from vllm.platforms import current_platform

from hybrid_plugin.upstream.hookpoints import resolve
from hybrid_plugin.vllm import contracts
from hybrid_plugin.vllm.patches import require
from hybrid_plugin.vllm.speculation import rolling_window
from hybrid_plugin.vllm.speculation.repetition import Pattern, Repetitions
from hybrid_plugin.vllm.speculation.stop_cut import End, StopCut
from hybrid_plugin.vllm.wrapping import wrap

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def apply(vllm_config: VllmConfig) -> None:
    """Mend what the worker of this platform gets wrong.

    Args:
        vllm_config: of the worker.

    Raises:
        ConfigError: for hook points that this vLLM moved.
    """
    if current_platform.is_cpu():
        require(contracts.CPU_SPECULATION_HOOKS)
        patch_ragged_rows_on_cpu()
        patch_single_rows_on_cpu()
        patch_mamba2_convolution_on_cpu()
        patch_mamba2_states_on_cpu()
    if not vllm_config.use_v2_model_runner:
        patch_paused_rows()
    elif vllm_config.scheduler_config.async_scheduling:
        require(contracts.STOP_HOOKS)
        patch_stops_in_accepted_runs()


def patch_ragged_rows_on_cpu() -> None:
    """Symptom: "The expanded size of the tensor must match" with n-gram drafts.

    Cause: a CPU's gated delta net keeps `state_len - tokens` inputs of a row's window
    from before the pass, where only the last `W - 2` of them precede its tokens.  Both
    are equal only for rows with all drafts; a shorter one fails, or, where nothing was
    accepted before, reads inputs of rejected drafts in the next pass.
    Fix: where a row is shorter, convolve with windows of our own making.
    Delete when: `_spec_forward` takes rows of different lengths.
    """

    def forward(
        original: Callable[..., torch.Tensor],
        layer: Any,
        attn_metadata_i: Any,
        mixed_qkv_spec: torch.Tensor,
        b_spec: torch.Tensor,
        a_spec: torch.Tensor,
        conv_buf: torch.Tensor,
        ssm_state: torch.Tensor,
        width: int,
        state_len: int,
    ) -> torch.Tensor:
        rows = attn_metadata_i.num_spec_decodes
        starts = attn_metadata_i.spec_query_start_loc[: rows + 1]
        if bool((starts.diff() == state_len - width + 2).all()):
            return original(
                layer,
                attn_metadata_i,
                mixed_qkv_spec,
                b_spec,
                a_spec,
                conv_buf,
                ssm_state,
                width,
                state_len,
            )
        owner, unpacked = resolve(contracts.GDN_CPU_WEIGHT)
        slots = attn_metadata_i.spec_state_indices_tensor[:rows].to(torch.int32)
        accepted = attn_metadata_i.num_accepted_tokens[:rows].to(torch.int32)
        mixed = rolling_window.convolve(
            mixed_qkv_spec,
            conv_buf,
            getattr(owner, unpacked)(layer),
            layer.conv1d.bias,
            slots[:, 0],
            accepted,
            starts,
            activation=layer.activation,
        )
        query, key, value = (
            part.squeeze(0) for part in layer.rearrange_mixed_qkv(mixed)
        )
        operations, verify = resolve(contracts.GDN_CPU_VERIFY)
        out: torch.Tensor = getattr(operations, verify)(
            A_log=layer.A_log,
            dt_bias=layer.dt_bias,
            q=query,
            k=key,
            v=value,
            a=a_spec,
            b=b_spec,
            initial_state_source=ssm_state,
            spec_state_indices=slots.contiguous(),
            num_accepted_tokens=accepted.contiguous(),
            cu_seqlens=starts.to(torch.int32).contiguous(),
            use_qk_l2norm_in_kernel=True,
        )
        return out

    wrap(contracts.GDN_CPU_ROWS, forward)


def patch_single_rows_on_cpu() -> None:
    """Symptom: "must be contiguous at last dimension" where a hit leaves one token.

    Cause: the slots of rows without drafts are a column of a table.  That of a single
    row counts as contiguous whatever its stride is, so `contiguous()` returns it, and
    the kernel asks for a stride of 1.
    Fix: hand over a copy.
    Delete when: `_spec_aware_nonspec` copies it, or the kernel takes any stride of one.
    """

    def forward(
        original: Callable[..., None], layer: Any, attn_metadata_i: Any, *rest: Any
    ) -> None:
        slots = attn_metadata_i.non_spec_state_indices_tensor
        if slots is not None and slots.stride(0) != 1:
            copied = torch.empty(len(slots), dtype=slots.dtype).copy_(slots)
            attn_metadata_i.non_spec_state_indices_tensor = copied
        original(layer, attn_metadata_i, *rest)

    wrap(contracts.GDN_CPU_PLAIN_ROWS, forward)


def patch_mamba2_convolution_on_cpu() -> None:
    """Symptom: answers of Mamba-2 models are wrong from the second token on.

    Cause: the convolution of a CPU takes `num_accepted_tokens` and ignores it.
    Fix: where it is given, convolve with windows of our own making.
    Delete when: `causal_conv1d_update_cpu` reads the argument.
    """

    def update(
        original: Callable[..., torch.Tensor],
        x: torch.Tensor,
        conv_state: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **more: Any,
    ) -> torch.Tensor:
        accepted = more.get("num_accepted_tokens")
        if accepted is None:
            return original(x, conv_state, weight, bias, activation, **more)
        starts = more["query_start_loc"]
        rows = len(starts) - 1
        return rolling_window.convolve(
            x,
            conv_state,
            weight,
            bias,
            more["conv_state_indices"].view(rows, -1)[:, 0],
            accepted[:rows],
            starts,
            activation=activation,
        )

    wrap(contracts.MAMBA2_CONVOLUTION, update)


def patch_mamba2_states_on_cpu() -> None:
    """Symptom: the same answers are wrong with the right convolution.

    Cause: `selective_state_update_cpu` reads a row's table of columns as if each entry
    were a row, ignores `num_accepted_tokens`, and writes a state that goes to another
    slot over its source as well.
    Fix: copy each state to the token's column first, and advance it there, a token of
    each row at a time.
    Delete when: the operation takes tables of columns.
    """

    def update(
        original: Callable[..., Any],
        state: torch.Tensor,
        x: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,  # noqa: N803
        B: torch.Tensor,  # noqa: N803
        C: torch.Tensor,  # noqa: N803
        *rest: Any,
        out: torch.Tensor,
        **more: Any,
    ) -> None:
        accepted = more.pop("num_accepted_tokens", None)
        if accepted is None:
            original(state, x, dt, A, B, C, *rest, out=out, **more)
            return
        starts = more.pop("cu_seqlens").long()
        more.pop("dst_state_batch_indices")
        columns = more.pop("state_batch_indices")[: len(starts) - 1].long()
        lengths = starts.diff()
        source = columns.gather(1, accepted[: len(columns), None].long() - 1)[:, 0]
        for step in range(int(lengths.max())):
            rows = (lengths > step).nonzero()[:, 0]
            tokens, slots = starts[rows] + step, columns[rows, step]
            state[slots] = state[source[rows]]
            done = torch.empty_like(out[tokens])
            original(
                state,
                x[tokens],
                dt[tokens],
                A,
                B[tokens],
                C[tokens],
                *rest,
                out=done,
                **more,
                state_batch_indices=slots.to(torch.int32),
            )
            out[tokens] = done
            source = columns[:, step]

    wrap(contracts.MAMBA2_UPDATE, update)


def patch_paused_rows() -> None:
    """Symptom: a request that sat out a step, for want of budget, answers wrongly.

    Cause: the V1 model runner drops its row from the batch, and with it how many of its
    drafts were accepted: its next step goes on from column 0.
    Fix: put the number back when the row comes back.
    Delete when: the runner keeps the number by request, as the V2 runner does.
    """

    def update(original: Callable[..., Any], runner: Any, scheduler_output: Any) -> Any:
        rows: dict[str, int] = runner.input_batch.req_id_to_index
        counts = runner.input_batch.num_accepted_tokens_cpu
        kept: dict[str, int] = runner.__dict__.setdefault(_PAUSED, {})
        for name in rows.keys() - scheduler_output.num_scheduled_tokens.keys():
            kept[name] = int(counts[rows[name]])
        done = original(runner, scheduler_output)
        # One that was preempted, or is another of the same name, begins in column 0.
        anew = {new.req_id for new in scheduler_output.scheduled_new_reqs}
        anew |= set(scheduler_output.scheduled_cached_reqs.resumed_req_ids)
        for name in kept.keys() & rows.keys():
            count = kept.pop(name)
            if name not in anew:
                counts[rows[name]] = count
        for name in kept.keys() - runner.requests.keys():
            del kept[name]
        return done

    wrap(contracts.V1_UPDATE_STATES, update)


def patch_stops_in_accepted_runs() -> None:
    """Symptom: a turn that ends at an accepted draft leaves no state.

    Cause: where steps are scheduled ahead, the next one starts behind all that was
    accepted, though the scheduler cuts the answer at the stop, and overwrites the
    states before it.
    Fix: count what is accepted behind a stop token, a repetition that the request asks
    to stop at, or the last token that it may have, as rejected.  Answers stay as they
    are.
    Delete when: the model runner knows where requests stop.
    """

    def add(original: Callable[..., None], runner: Any, scheduler_output: Any) -> None:
        original(runner, scheduler_output)
        cut, repetitions = _stops(runner)
        ends = []
        for new in scheduler_output.scheduled_new_reqs:
            given = new.sampling_params
            ids = set(given.stop_token_ids or ())
            if given.eos_token_id is not None:
                ids.add(given.eos_token_id)
            length = min(new.prompt_len + given.max_tokens, runner.max_model_len)
            row = runner.req_states.req_id_to_index[new.req_id]
            ends.append(End(row, ids, length))
            pattern = Pattern.of(given)
            repetitions.add(row, pattern, new.prompt_len, given.min_tokens)
        cut.add(ends)

    def sample(
        original: Callable[..., Any],
        runner: Any,
        hidden_states: Any,
        input_batch: Any,
        grammar_output: Any,
    ) -> Any:
        output, sampled, rejected = original(
            runner, hidden_states, input_batch, grammar_output
        )
        if input_batch.num_draft_tokens > 0:
            cut, repetitions = _stops(runner)
            tokens, rows = output.sampled_token_ids, input_batch.idx_mapping
            states = runner.req_states
            computed = states.num_computed_tokens.gpu
            repeated = repetitions.ends(
                input_batch.idx_mapping_np.tolist(),
                tokens,
                rows,
                computed,
                states.all_token_ids.gpu,
            )
            sampled, rejected = cut.cut(
                tokens, sampled, rejected, rows, computed, repeated
            )
            output.num_sampled, output.num_rejected = sampled, rejected
        return output, sampled, rejected

    wrap(contracts.V2_ADD_REQUESTS, add)
    wrap(contracts.V2_SAMPLE, sample)


def _stops(runner: Any) -> tuple[StopCut, Repetitions]:
    found: tuple[StopCut, Repetitions] | None = runner.__dict__.get(_STOPS)
    if found is None:
        rows, device = runner.max_num_reqs, runner.device
        found = StopCut(rows, device), Repetitions(rows, device)
        found[0].warm_up(1 + runner.num_speculative_steps)
        runner.__dict__[_STOPS] = found
    return found


_STOPS = "hybrid_plugin_stops"
"""Attribute of a V2 model runner: what ends its requests."""
_PAUSED = "hybrid_plugin_accepted"
"""Attribute of a V1 model runner: tokens accepted of each request's last step."""
