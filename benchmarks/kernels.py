# SPDX-License-Identifier: Apache-2.0
"""Speed of `hybrid_kernels` on one GPU, beside every peer that can be imported.

    python benchmarks/kernels.py --out benchmarks/results/kernels-h200

writes ``.json`` and ``.md``. Each call is captured in a CUDA graph, several copies
deep and over rotating slots, so that launch overhead and the L2 cache stay out of
the numbers; calls that cannot be captured run eagerly and are marked so. A number
is the median of repeated replays. Peers that cannot be imported are left out.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from hybrid_kernels import causal_conv1d, gated_delta_rule, kda, ssd, state_copy
from torch.nn import functional

Call = Callable[[int], object]
ROTATE = 4


@dataclass(frozen=True)
class Head:
    """The state layer of one model on one GPU without tensor parallelism."""

    model: str
    keys: int
    values: int
    depth: int
    width: int


DELTA = [
    Head("Qwen3-Next-80B-A3B", 16, 32, 128, 128),
    Head("Qwen3.5-397B-A17B", 16, 64, 128, 128),
]
SSD = [
    Head("Nemotron-H-8B", 8, 128, 128, 64),
    Head("Falcon-H1-34B", 2, 32, 256, 128),
]
KDA = [Head("Kimi-Linear-48B-A3B", 32, 32, 128, 128)]
BATCHES = (1, 8, 32, 64, 128, 256, 512)
TOKENS = (128, 1024, 8192, 32768)


@dataclass
class Row:
    """One measurement."""

    op: str
    shape: str
    size: str
    library: str
    microseconds: float
    gigabytes_per_second: float | None
    mode: str


def find(module: str, name: str) -> Any:
    """A peer's function, or None."""
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # a peer may fail to import in any way
        print(f"no {module}.{name}: {error!r}", file=sys.stderr)
        return None


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.float32).to(dtype)


def _replays(replay: Callable[[], object], calls: int) -> float:
    """Median microseconds of one of the calls in a replay."""
    times = []
    for number in range(23):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        replay()
        end.record()
        end.synchronize()
        if number >= 3:
            times.append(begin.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times)


def measure(call: Call) -> tuple[float, str]:
    """Microseconds per call and how it ran."""
    for index in range(ROTATE):
        call(index)
    torch.cuda.synchronize()

    def everything() -> None:
        for index in range(ROTATE):
            call(index)

    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            everything()
        return _replays(graph.replay, ROTATE), "graph"
    except Exception:
        torch.cuda.synchronize()
        return _replays(everything, ROTATE), "eager"


def compare(
    op: str, head: str, size: str, calls: dict[str, Call | None], moved: float | None
) -> Iterator[Row]:
    """Measure one point for each library."""
    for library, call in calls.items():
        if call is None:
            continue
        try:
            time, mode = measure(call)
        except Exception as error:
            print(f"{op} {head} {size} {library}: {error!r}", file=sys.stderr)
            traceback.print_exc(limit=-2)
            continue
        rate = None if moved is None else moved / time / 1e3
        yield Row(op, head, size, library, time, rate, mode)


def rotating_slots(batch: int) -> tuple[int, torch.Tensor]:
    """How many slots a pool needs, and `ROTATE` disjoint lists; slot 0 is unused."""
    order = torch.randperm(ROTATE * batch, device="cuda") + 1
    return ROTATE * batch + 1, order.view(ROTATE, batch).int()


def delta_update(head: Head, batch: int) -> Iterator[Row]:
    """Decode with the layer's gates fused, as a server runs it."""
    count, slots = rotating_slots(batch)
    pool = randn(count, head.values, head.width, head.depth, dtype=torch.float32)
    q, k = (randn(batch, head.keys, head.depth) for _ in range(2))
    v, out = (randn(batch, head.values, head.width) for _ in range(2))
    a, b = (randn(batch, head.values) for _ in range(2))
    log_a, shift = (randn(head.values, dtype=torch.float32) for _ in range(2))
    rate = -log_a.exp()
    cu = torch.arange(batch + 1, device="cuda", dtype=torch.int32)
    vllm = find(
        "vllm.third_party.flash_linear_attention.ops.fused_sigmoid_gating",
        "fused_sigmoid_gating_delta_rule_update",
    )
    fla = find("fla.ops.gated_delta_rule", "fused_recurrent_gated_delta_rule")
    g = rate * functional.softplus(a.float() + shift)
    beta = b.sigmoid()

    def ours(index: int) -> object:
        return gated_delta_rule.update(
            q,
            k,
            v,
            a,
            b,
            pool,
            slots[index],
            rate=rate,
            bias=shift,
            normalise=True,
            out=out,
        )

    def theirs(index: int) -> object:
        return vllm(
            A_log=log_a,
            a=a,
            b=b,
            dt_bias=shift,
            q=q[None],
            k=k[None],
            v=v[None],
            initial_state=pool,
            inplace_final_state=True,
            cu_seqlens=cu,
            ssm_state_indices=slots[index],
            use_qk_l2norm_in_kernel=True,
        )

    def packed(index: int) -> object:
        start = index * batch
        return fla(
            q[:, None],
            k[:, None],
            v[:, None],
            g[:, None],
            beta=beta[:, None],
            initial_state=pool[start : start + batch],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            state_v_first=True,
        )

    calls = {
        "hybrid_kernels": ours,
        "vllm": theirs if vllm else None,
        "fla (gates not fused, no slots)": packed if fla else None,
    }
    moved = 2.0 * batch * pool[0].nbytes
    yield from compare("gated_delta_rule.update", head.model, f"{batch}", calls, moved)


def ssd_update(head: Head, batch: int) -> Iterator[Row]:
    """Decode."""
    count, slots = rotating_slots(batch)
    pool = randn(count, head.values, head.width, head.depth, dtype=torch.float32)
    x, gate, out = (randn(batch, head.values, head.width) for _ in range(3))
    b, c = (randn(batch, head.keys, head.depth) for _ in range(2))
    dt = randn(batch, head.values)
    a = -torch.rand(head.values, device="cuda") - 0.5
    skip, bias = (randn(head.values, dtype=torch.float32) for _ in range(2))
    wide = {
        "dt": dt[..., None].expand(-1, -1, head.width),
        "A": a[:, None, None].expand(-1, head.width, head.depth),
        "D": skip[:, None].expand(-1, head.width),
        "dt_bias": bias[:, None].expand(-1, head.width),
    }
    vllm = find("vllm.model_executor.layers.mamba.ops.mamba_ssm", UPDATE)
    mamba = find("mamba_ssm.ops.triton.selective_state_update", UPDATE)

    def ours(index: int) -> object:
        return ssd.update(
            x,
            dt,
            a,
            b,
            c,
            pool,
            slots[index],
            skip=skip,
            gate=gate,
            bias=bias,
            out=out,
        )

    def peer(function: Any, **more: object) -> Call | None:
        if function is None:
            return None

        # Its 32-bit indices overflow where the pool passes 2**31 elements.
        wide_slots = slots.long()

        def call(index: int) -> object:
            return function(
                pool,
                x,
                B=b,
                C=c,
                z=gate,
                dt_softplus=True,
                state_batch_indices=wide_slots[index],
                **wide,
                **more,
            )

        return call

    calls = {
        "hybrid_kernels": ours,
        "vllm": peer(vllm, out=out),
        "mamba_ssm": peer(mamba),
    }
    moved = 2.0 * batch * pool[0].nbytes
    yield from compare("ssd.update", head.model, f"{batch}", calls, moved)


UPDATE = "selective_state_update"


def delta_prefill(head: Head, sequences: int, tokens: int) -> Iterator[Row]:
    """Prefill of equally long sequences."""
    total = sequences * tokens
    q, k = (randn(total, head.keys, head.depth) for _ in range(2))
    v, out = (randn(total, head.values, head.width) for _ in range(2))
    g = -functional.softplus(randn(total, head.values, dtype=torch.float32))
    beta = torch.rand(total, head.values, device="cuda")
    pool = torch.zeros(
        ROTATE * sequences, head.values, head.width, head.depth, device="cuda"
    )
    slots = torch.arange(ROTATE * sequences, device="cuda", dtype=torch.int32)
    slots = slots.view(ROTATE, sequences)
    cu = torch.arange(sequences + 1, device="cuda") * tokens
    fla = find("fla.ops.gated_delta_rule", "chunk_gated_delta_rule")

    def ours(index: int) -> object:
        return gated_delta_rule.prefill(
            q, k, v, g, beta, cu, pool, slots[index], normalise=True, out=out
        )

    def theirs(index: int) -> object:
        start = index * sequences
        with torch.no_grad():
            return fla(
                q[None],
                k[None],
                v[None],
                g[None],
                beta[None],
                initial_state=pool[start : start + sequences],
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
                state_v_first=True,
                cu_seqlens=cu,
            )

    calls = {"hybrid_kernels": ours, "fla": theirs if fla else None}
    size = f"{sequences} x {tokens}"
    yield from compare("gated_delta_rule.prefill", head.model, size, calls, None)


def ssd_prefill(head: Head, sequences: int, tokens: int) -> Iterator[Row]:
    """Prefill of equally long sequences."""
    total = sequences * tokens
    x, out = (randn(total, head.values, head.width) for _ in range(2))
    b, c = (randn(total, head.keys, head.depth) for _ in range(2))
    dt = randn(total, head.values)
    a = -torch.rand(head.values, device="cuda") - 0.5
    skip, bias = (randn(head.values, dtype=torch.float32) for _ in range(2))
    pool = torch.zeros(
        ROTATE * sequences, head.values, head.width, head.depth, device="cuda"
    )
    slots = torch.arange(ROTATE * sequences, device="cuda", dtype=torch.int32)
    slots = slots.view(ROTATE, sequences)
    cu = torch.arange(sequences + 1, device="cuda", dtype=torch.int32) * tokens
    seq_idx = torch.arange(sequences, device="cuda", dtype=torch.int32)
    seq_idx = seq_idx.repeat_interleave(tokens)[None]
    mamba = find("mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined")

    def ours(index: int) -> object:
        return ssd.prefill(
            x, dt, a, b, c, cu, pool, slots[index], skip=skip, bias=bias, out=out
        )

    def theirs(index: int) -> object:
        with torch.no_grad():
            return mamba(
                x[None],
                dt[None],
                a,
                b[None],
                c[None],
                chunk_size=256,
                D=skip,
                dt_bias=bias,
                dt_softplus=True,
                seq_idx=seq_idx,
                cu_seqlens=cu,
                return_final_states=True,
                return_varlen_states=True,
            )

    calls = {"hybrid_kernels": ours, "mamba_ssm": theirs if mamba else None}
    size = f"{sequences} x {tokens}"
    yield from compare("ssd.prefill", head.model, size, calls, None)


def kda_update(head: Head, batch: int) -> Iterator[Row]:
    """Decode."""
    count, slots = rotating_slots(batch)
    pool = randn(count, head.values, head.width, head.depth, dtype=torch.float32)
    q, k, v = (randn(batch, head.values, head.depth) for _ in range(3))
    out = torch.empty_like(v)
    g = -functional.softplus(randn(*k.shape, dtype=torch.float32))
    beta = torch.rand(batch, head.values, device="cuda")
    fla = find("fla.ops.kda", "fused_recurrent_kda")

    def ours(index: int) -> object:
        return kda.update(q, k, v, g, beta, pool, slots[index], normalise=True, out=out)

    def packed(index: int) -> object:
        start = index * batch
        return fla(
            q[:, None],
            k[:, None],
            v[:, None],
            g[:, None],
            beta[:, None],
            initial_state=pool[start : start + batch],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            state_v_first=True,
        )

    calls = {"hybrid_kernels": ours, "fla (no slots)": packed if fla else None}
    moved = 2.0 * batch * pool[0].nbytes
    yield from compare("kda.update", head.model, f"{batch}", calls, moved)


def kda_prefill(head: Head, tokens: int) -> Iterator[Row]:
    """Prefill of one sequence."""
    q, k, v = (randn(tokens, head.values, head.depth) for _ in range(3))
    out = torch.empty_like(v)
    g = -functional.softplus(randn(*k.shape, dtype=torch.float32))
    beta = torch.rand(tokens, head.values, device="cuda")
    pool = torch.zeros(ROTATE, head.values, head.width, head.depth, device="cuda")
    slots = torch.arange(ROTATE, device="cuda", dtype=torch.int32).view(ROTATE, 1)
    cu = torch.tensor([0, tokens], device="cuda")
    fla = find("fla.ops.kda", "chunk_kda")

    def ours(index: int) -> object:
        return kda.prefill(
            q, k, v, g, beta, cu, pool, slots[index], normalise=True, out=out
        )

    def theirs(index: int) -> object:
        with torch.no_grad():
            return fla(
                q[None],
                k[None],
                v[None],
                g[None],
                beta[None],
                initial_state=pool[index : index + 1],
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
                state_v_first=True,
                cu_seqlens=cu,
            )

    calls = {"hybrid_kernels": ours, "fla": theirs if fla else None}
    yield from compare("kda.prefill", head.model, f"1 x {tokens}", calls, None)


def conv(channels: int, batch: int) -> Iterator[Row]:
    """Decode update of the convolution, channels contiguous as in vLLM."""
    count, slots = rotating_slots(batch)
    pool = randn(count, 3, channels).transpose(1, 2)
    x, out = randn(batch, channels), randn(batch, channels)
    weight = randn(channels, 4)
    name = "causal_conv1d_update"
    vllm = find("vllm.model_executor.layers.mamba.ops.causal_conv1d", name)

    def ours(index: int) -> object:
        return causal_conv1d.update(
            x, weight, None, pool, slots[index], activation="silu", out=out
        )

    def theirs(index: int) -> object:
        return vllm(
            x, pool, weight, None, "silu", conv_state_indices=slots[index], out=out
        )

    calls = {"hybrid_kernels": ours, "vllm": theirs if vllm else None}
    moved = batch * (2.0 * pool[0].nbytes + 2 * x[0].nbytes)
    yield from compare(
        "causal_conv1d.update", f"D={channels}", f"{batch}", calls, moved
    )


def conv_prefill(channels: int, tokens: int) -> Iterator[Row]:
    """Prefill of one sequence."""
    x, out = randn(tokens, channels), randn(tokens, channels)
    weight = randn(channels, 4)
    pool = randn(ROTATE, 3, channels).transpose(1, 2)
    slots = torch.arange(ROTATE, device="cuda", dtype=torch.int32).view(ROTATE, 1)
    cu = torch.tensor([0, tokens], device="cuda", dtype=torch.int32)
    fla = find("fla.modules.causal_conv1d", "causal_conv1d")

    def ours(index: int) -> object:
        return causal_conv1d.prefill(
            x, weight, None, cu, pool, slots[index], activation="silu", out=out
        )

    def theirs(index: int) -> object:
        with torch.no_grad():
            return fla(x[None], weight, None, activation="silu", cu_seqlens=cu)

    calls = {"hybrid_kernels": ours, "fla (no state)": theirs if fla else None}
    moved = 2.0 * x.nbytes
    shape = f"D={channels}"
    yield from compare("causal_conv1d.prefill", shape, f"1 x {tokens}", calls, moved)


def copies(megabytes: int, pairs: int, layers: int) -> Iterator[Row]:
    """Forks of slots; torch's own copy of as many bytes beside it."""
    slots = 2 * pairs * ROTATE
    item = megabytes * 2**20 // layers
    shape = (slots, item) if layers == 1 else (layers, slots, item)
    pool = torch.randint(0, 255, shape, device="cuda", dtype=torch.uint8)
    order = torch.randperm(slots, device="cuda").view(ROTATE, 2, pairs)
    flat = torch.randn(2, pairs * megabytes * 2**18, device="cuda")
    slot_dim = 0 if layers == 1 else 1

    def ours(index: int) -> object:
        return state_copy.fork(pool, *order[index], slot_dim=slot_dim)

    calls: dict[str, Call | None] = {
        "hybrid_kernels": ours,
        "torch.neg of contiguous words": lambda index: torch.neg(flat[1], out=flat[0]),
    }
    layout = "slot-major" if layers == 1 else f"{layers} layers"
    moved = 2.0 * pairs * megabytes * 2**20
    size = f"{pairs} x {megabytes} MiB"
    yield from compare("state_copy.fork", layout, size, calls, moved)


def copy_bandwidth() -> float:
    """Gigabytes read and written per second by a large device copy.

    The better of `copy_`, which may go to the copy engine, and an elementwise kernel.
    """
    data = torch.randn(2, 2**29, device="cuda")
    calls: tuple[Call, ...] = (
        lambda index: data[0].copy_(data[1]),
        lambda index: torch.neg(data[1], out=data[0]),
    )
    return max(2.0 * 2**31 / measure(call)[0] / 1e3 for call in calls)


def everything(quick: bool) -> Iterator[Row]:
    """All points; a short list with `quick`."""
    batches = (1, 64, 512) if quick else BATCHES
    for batch in batches:
        for head in DELTA:
            yield from delta_update(head, batch)
        for head in SSD:
            yield from ssd_update(head, batch)
        for head in KDA:
            yield from kda_update(head, batch)
        yield from conv(8192, batch)
    for megabytes, pairs in ((1, 1), (8, 1), (64, 1), (64, 8), (64, 32)):
        yield from copies(megabytes, pairs, 1)
        yield from copies(megabytes, pairs, 32)
    for tokens in TOKENS[1:3] if quick else TOKENS:
        yield from delta_prefill(DELTA[0], 1, tokens)
        yield from ssd_prefill(SSD[0], 1, tokens)
        yield from kda_prefill(KDA[0], tokens)
        yield from conv_prefill(8192, tokens)
    for head in DELTA[1:]:
        yield from delta_prefill(head, 8, 1024)
    for head in SSD[1:]:
        yield from ssd_prefill(head, 8, 1024)


NOTES = (
    "Decode bytes are the states read and written once; other operands are left out.",
    "Speed ratio: the peer's time over ours; above 1 ours is faster.",
    "fla's decode kernels read a packed state and write a new one: no slots, not in "
    "place, gates computed before. mamba_ssm's prefill also packs states by itself.",
)


def table(
    rows: list[Row], bandwidth: float, about: dict[str, str], notes: list[str]
) -> str:
    """Markdown: ours beside each peer."""
    lines = [
        "# Kernel speed",
        "",
        ", ".join(f"{name} {value}" for name, value in about.items()),
        "",
        f"Copy bandwidth (read + written, 2 GiB): {bandwidth:.0f} GB/s.",
        "",
        *(f"- {note}" for note in (*NOTES, *notes)),
        "",
        "| op | shape | size | us | of copy bandwidth | peer | peer us | speed ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    points: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        points.setdefault((row.op, row.shape, row.size), []).append(row)
    for (op, shape, size), group in points.items():
        mine = [row for row in group if row.library == "hybrid_kernels"]
        if not mine:
            continue
        ours = mine[0]
        rate = ours.gigabytes_per_second
        share = "" if rate is None else f"{rate / bandwidth:.0%}"
        peers = [row for row in group if row is not ours] or [None]
        for peer in peers:
            tail = "| | | |"
            if peer:
                ratio = peer.microseconds / ours.microseconds
                mark = "" if peer.mode == ours.mode else f" ({peer.mode})"
                tail = (
                    f"| {peer.library} | {peer.microseconds:.1f}{mark} | {ratio:.2f} |"
                )
            lines.append(
                f"| {op} | {shape} | {size} | {ours.microseconds:.1f} | {share} {tail}"
            )
    return "\n".join(lines) + "\n"


def versions() -> dict[str, str]:
    """What the numbers were taken with."""
    about = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
    }
    for name in ("triton", "fla", "mamba_ssm", "vllm"):
        try:
            module = importlib.import_module(name)
        except Exception:
            continue
        about[name] = getattr(module, "__version__", "version unknown")
    return about


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--note", action="append", default=[], help="added to the text")
    options = parser.parse_args()
    torch.manual_seed(0)
    bandwidth, about = copy_bandwidth(), versions()
    rows: list[Row] = []
    for row in everything(options.quick):
        rows.append(row)
        # Written as it grows: a run cut short keeps what it has.
        result = {
            "versions": about,
            "copy_gigabytes_per_second": bandwidth,
            "notes": [*NOTES, *options.note],
            "rows": [asdict(entry) for entry in rows],
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.with_suffix(".json").write_text(json.dumps(result, indent=1))
        text = table(rows, bandwidth, about, options.note)
        options.out.with_suffix(".md").write_text(text)
    print(json.dumps(about))
    print(text)


if __name__ == "__main__":
    main()
