# SPDX-License-Identifier: Apache-2.0
"""The tiny Qwen3-Next network, written for fast training.

Numerics are those of `Qwen3NextForCausalLM` in
transformers; `checkpoint_weights` gives the checkpoint's tensors. What differs
is speed (a chunked gated delta rule without a loop over rows, experts as one
dense product) and one extra input: an attention mask that can hide distant
tokens from the attention layers, which forces the recurrent state to carry them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

BYTES = 256
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END_OF_TEXT, IM_START, IM_END = (BYTES + i for i in range(len(SPECIAL_TOKENS)))

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "dtype": "bfloat16",
    # 256 bytes, 3 special tokens, padded to a multiple of 8
    "vocab_size": 264,
    "hidden_size": 192,
    "intermediate_size": 384,  # of dense layers; there are none
    "num_hidden_layers": 8,
    "full_attention_interval": 4,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    # Both engines want a mixture of experts in this architecture. Every token uses
    # every expert, so that no rounding error can flip a routing decision.
    "num_experts": 2,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "norm_topk_prob": True,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.0,
    "mlp_only_layers": [],
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "max_position_embeddings": 16384,
    # both spellings: readers before transformers 5 know only the flat ones
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    },
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "use_cache": True,
    "bos_token_id": None,
    "pad_token_id": END_OF_TEXT,
    "eos_token_id": IM_END,
}

HIDDEN: int = CONFIG["hidden_size"]
EPS: float = CONFIG["rms_norm_eps"]
CHUNK = 64


class UnitLowerInverse(torch.autograd.Function):
    """Inverse of a batch of unit lower triangular matrices (size a power of two).

    Inverts blocks of doubling size, [[A, 0], [C, D]] -> [[A', 0], [-D' C A', D']]:
    log2(size) batched products instead of a loop over rows.
    """

    @staticmethod
    def forward(ctx: Any, matrix: Tensor) -> Tensor:
        """Return the inverse of `matrix`; only its strict lower triangle is read."""
        size = matrix.shape[-1]
        inverse = torch.eye(size, dtype=matrix.dtype, device=matrix.device)
        inverse = inverse.expand_as(matrix).clone()
        half = 1
        while half < size:
            n = size // (2 * half)
            # diagonal blocks of 2 * half, as views (..., n, 2 * half, 2 * half)
            shape = (*matrix.shape[:-2], n, 2 * half, n, 2 * half)
            source = matrix.reshape(shape).diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
            target = inverse.view(shape).diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
            upper = target[..., :half, :half]
            lower = target[..., half:, half:]
            target[..., half:, :half] = -(lower @ source[..., half:, :half] @ upper)
            half *= 2
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Gradient of the inverse: -T' G T', strict lower triangle."""
        (inverse,) = ctx.saved_tensors
        transposed = inverse.transpose(-1, -2)
        grad: Tensor = -(transposed @ grads[0] @ transposed).tril(-1)
        return grad


class Scan(torch.autograd.Function):
    """States before each chunk: S(0) = 0, S(i + 1) = step(i) S(i) + add(i)."""

    @staticmethod
    def forward(ctx: Any, step: Tensor, add: Tensor) -> Tensor:
        """Run along dimension 2 of (batch, heads, chunks, rows, columns)."""
        states = [torch.zeros_like(add[:, :, 0])]
        for i in range(add.shape[2] - 1):
            states.append(step[:, :, i] @ states[-1] + add[:, :, i])
        stacked = torch.stack(states, dim=2)
        ctx.save_for_backward(step, stacked)
        return stacked

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        """Run the transposed recurrence from the end."""
        step, states = ctx.saved_tensors
        turned = step.transpose(-1, -2)
        # what the state after chunk i receives
        after = [torch.zeros_like(states[:, :, 0])]
        for i in range(states.shape[2] - 1, 0, -1):
            after.append(turned[:, :, i] @ after[-1] + grads[0][:, :, i])
        received = torch.stack(after[::-1], dim=2)
        return received @ states.transpose(-1, -2), received


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor
) -> Tensor:
    """Chunked gated delta rule from a zero state; returns what `v` is shaped like.

    `q` and `k` are (batch, heads, time, key dim), L2-normalised, `q` already
    scaled; `v` is (batch, heads, time, value dim). `decay`, the log decay per
    token (<= 0), and `beta`, the write strength in (0, 1), are (batch, heads,
    time). `time` must be a multiple of the chunk.
    """
    b, h, t, _ = q.shape
    q, k, v = (x.reshape(b, h, t // CHUNK, CHUNK, -1) for x in (q, k, v))
    total = decay.reshape(b, h, t // CHUNK, CHUNK).cumsum(-1)
    beta = beta.reshape(b, h, t // CHUNK, CHUNK, 1)
    causal = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    pair = (
        (total.unsqueeze(-1) - total.unsqueeze(-2))
        .masked_fill(~causal, -math.inf)
        .exp()
    )
    k_beta = k * beta
    kt = k.transpose(-1, -2)
    inverse: Tensor = UnitLowerInverse.apply((k_beta @ kt) * pair)  # type: ignore[no-untyped-call]
    inner = (q @ kt) * pair
    grown = total.exp().unsqueeze(-1)
    value = inverse @ (v * beta)
    k_decayed = inverse @ (k_beta * grown)
    k_rest = (k * (total[..., -1:] - total).exp().unsqueeze(-1)).transpose(-1, -2)
    # over a whole chunk the state moves by an affine map
    identity = torch.eye(q.shape[-1], device=q.device)
    step = total[..., -1].exp()[..., None, None] * identity - k_rest @ k_decayed
    states: Tensor = Scan.apply(step, k_rest @ value)  # type: ignore[no-untyped-call]
    new = value - k_decayed @ states
    return ((q * grown) @ states + inner @ new).reshape(b, h, t, -1)


def l2norm(x: Tensor) -> Tensor:
    """Normalise the last dimension to length one."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


class Linear(nn.Linear):
    """A projection without bias, computed in `compute`."""

    compute: torch.dtype = torch.float32

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Project the last dimension."""
        return functional.linear(x.to(self.compute), self.weight.to(self.compute))


class Norm(nn.Module):
    """Root-mean-square norm with a weight around zero, as Qwen3-Next has it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise in float32."""
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS)
        return y * (1.0 + self.weight)


class GatedNorm(nn.Module):
    """Norm of a gated-delta-net head, followed by its SiLU gate."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Normalise and gate in float32."""
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS) * self.weight
        return y * functional.silu(gate.float())


class GatedDeltaNet(nn.Module):
    """The state layer."""

    def __init__(self) -> None:
        super().__init__()
        self.k_heads: int = CONFIG["linear_num_key_heads"]
        self.v_heads: int = CONFIG["linear_num_value_heads"]
        self.k_dim: int = CONFIG["linear_key_head_dim"]
        self.v_dim: int = CONFIG["linear_value_head_dim"]
        key, value = self.k_heads * self.k_dim, self.v_heads * self.v_dim
        conv = 2 * key + value
        width: int = CONFIG["linear_conv_kernel_dim"]
        self.conv1d = nn.Conv1d(conv, conv, width, groups=conv, bias=False)
        self.in_proj_qkvz = Linear(HIDDEN, conv + value)
        self.in_proj_ba = Linear(HIDDEN, 2 * self.v_heads)
        # slow decay: time constants from a few tokens to tens of thousands
        step = torch.exp(
            torch.empty(self.v_heads).uniform_(math.log(1e-4), math.log(0.05))
        )
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))
        self.A_log = nn.Parameter(torch.empty(self.v_heads).uniform_(0.5, 4.0).log())
        self.norm = GatedNorm(self.v_dim)
        self.out_proj = Linear(value, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        """Mix along time, from a zero state."""
        b, t, _ = x.shape
        ratio = self.v_heads // self.k_heads
        qkvz = self.in_proj_qkvz(x).view(b, t, self.k_heads, -1)
        q, k, v, z = torch.split(
            qkvz, [self.k_dim, self.k_dim, *[ratio * self.v_dim] * 2], dim=-1
        )
        beta, a = self.in_proj_ba(x).view(b, t, self.k_heads, -1).split(ratio, dim=-1)
        mixed = torch.cat([part.reshape(b, t, -1) for part in (q, k, v)], dim=-1)
        # a causal depthwise convolution as a sum of shifted copies
        weight = self.conv1d.weight
        padded = functional.pad(mixed.float(), (0, 0, weight.shape[-1] - 1, 0))
        conv = sum(
            padded[:, i : i + t] * weight[:, 0, i] for i in range(weight.shape[-1])
        )
        assert isinstance(conv, Tensor)
        sizes = [self.k_heads * self.k_dim] * 2 + [self.v_heads * self.v_dim]
        q, k, v = torch.split(functional.silu(conv), sizes, dim=-1)
        q = l2norm(q.view(b, t, self.k_heads, -1)) * self.k_dim**-0.5
        k = l2norm(k.view(b, t, self.k_heads, -1))
        q, k = (y.repeat_interleave(ratio, dim=2).transpose(1, 2) for y in (q, k))
        v = v.view(b, t, self.v_heads, -1).transpose(1, 2)
        a = a.reshape(b, t, -1).float()
        decay = -self.A_log.float().exp() * functional.softplus(a + self.dt_bias)
        beta = beta.reshape(b, t, -1).float().sigmoid()
        out = gated_delta_rule(q, k, v, decay.transpose(1, 2), beta.transpose(1, 2))
        out = self.norm(out.transpose(1, 2), z.reshape(b, t, self.v_heads, -1))
        result: Tensor = self.out_proj(out.reshape(b, t, -1))
        return result


class Attention(nn.Module):
    """The attention layer, with Qwen3-Next's output gate."""

    def __init__(self) -> None:
        super().__init__()
        self.heads: int = CONFIG["num_attention_heads"]
        self.kv_heads: int = CONFIG["num_key_value_heads"]
        self.dim: int = CONFIG["head_dim"]
        self.q_proj = Linear(HIDDEN, 2 * self.heads * self.dim)
        self.k_proj = Linear(HIDDEN, self.kv_heads * self.dim)
        self.v_proj = Linear(HIDDEN, self.kv_heads * self.dim)
        self.o_proj = Linear(self.heads * self.dim, HIDDEN)
        self.q_norm = Norm(self.dim)
        self.k_norm = Norm(self.dim)

    def rotate(self, x: Tensor) -> Tensor:
        """Rotary position embedding of the first quarter of each head."""
        dim = int(self.dim * CONFIG["partial_rotary_factor"])
        steps = torch.arange(0, dim, 2, dtype=torch.float32, device=x.device) / dim
        position = torch.arange(x.shape[-2], dtype=torch.float32, device=x.device)
        angle = position[:, None] * (1.0 / CONFIG["rope_theta"] ** steps)
        cos, sin = angle.cos().type_as(x), angle.sin().type_as(x)
        left, right, rest = torch.split(x, [dim // 2, dim // 2, self.dim - dim], dim=-1)
        return torch.cat(
            [left * cos - right * sin, right * cos + left * sin, rest], dim=-1
        )

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys and values (batch, heads, time, dim), and the output gate."""
        b, t, _ = x.shape
        q, gate = self.q_proj(x).view(b, t, self.heads, -1).chunk(2, dim=-1)
        k = self.k_proj(x).view(b, t, self.kv_heads, -1)
        v = self.v_proj(x).view(b, t, self.kv_heads, -1).transpose(1, 2)
        q, k = (
            self.rotate(y.transpose(1, 2)) for y in (self.q_norm(q), self.k_norm(k))
        )
        return q, k, v, gate.reshape(b, t, -1).sigmoid()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Attend where `mask` (batch or 1, 1, time, time) is true."""
        b, t, _ = x.shape
        q, k, v, gate = self.project(x)
        ratio = self.heads // self.kv_heads
        k, v = (y.repeat_interleave(ratio, dim=1) for y in (k, v))
        out = functional.scaled_dot_product_attention(
            q.type_as(v), k.type_as(v), v, attn_mask=mask
        )
        result: Tensor = self.o_proj(out.transpose(1, 2).reshape(b, t, -1) * gate)
        return result


class Experts(nn.Module):
    """The shared expert and the routed ones, side by side in one SwiGLU.

    All routed experts are always chosen, so the mixture is a dense MLP whose
    inner blocks are scaled: the shared block by a sigmoid, the others by a
    softmax. `checkpoint_weights` takes it apart into the checkpoint's tensors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.experts: int = CONFIG["num_experts"]
        self.block: int = CONFIG["moe_intermediate_size"]
        assert self.block == CONFIG["shared_expert_intermediate_size"]
        inner = (1 + self.experts) * self.block
        self.gate_proj = Linear(HIDDEN, inner)
        self.up_proj = Linear(HIDDEN, inner)
        self.down_proj = Linear(inner, HIDDEN)
        self.router = Linear(HIDDEN, 1 + self.experts)

    def forward(self, x: Tensor) -> Tensor:
        """Apply to every position."""
        scores = self.router(x).float()
        scale = torch.cat(
            [scores[..., :1].sigmoid(), scores[..., 1:].softmax(-1)], dim=-1
        )
        y = functional.silu(self.gate_proj(x)) * self.up_proj(x)
        y = y.unflatten(-1, (1 + self.experts, self.block)) * scale.type_as(
            y
        ).unsqueeze(-1)
        result: Tensor = self.down_proj(y.flatten(-2))
        return result


class Layer(nn.Module):
    """A token mixer and experts, each behind a norm and a residual."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind == "linear_attention":
            self.linear_attn = GatedDeltaNet()
        else:
            self.self_attn = Attention()
        self.mlp = Experts()
        self.input_layernorm = Norm(HIDDEN)
        self.post_attention_layernorm = Norm(HIDDEN)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """One layer; `mask` matters to attention layers alone."""
        y = self.input_layernorm(x)
        if self.kind == "linear_attention":
            x = x + self.linear_attn(y)
        else:
            x = x + self.self_attn(y, mask)
        result: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return result


class Body(nn.Module):
    """Everything under the checkpoint's `model.` prefix."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(CONFIG["vocab_size"], HIDDEN)
        self.layers = nn.ModuleList(Layer(kind) for kind in CONFIG["layer_types"])
        self.norm = Norm(HIDDEN)


class Network(nn.Module):
    """`Qwen3NextForCausalLM` for training."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Body()
        self.lm_head = Linear(HIDDEN, CONFIG["vocab_size"])
        depth = len(CONFIG["layer_types"])
        for name, parameter in self.named_parameters():
            if name.endswith("conv1d.weight"):
                nn.init.normal_(parameter, std=0.4)
            elif parameter.dim() == 2:
                std = parameter.shape[-1] ** -0.5
                if name.endswith(
                    ("o_proj.weight", "out_proj.weight", "down_proj.weight")
                ):
                    std *= (2 * depth) ** -0.5
                if "lm_head" in name or "embed" in name:
                    std = CONFIG["initializer_range"]
                nn.init.normal_(parameter, std=std)

    def hidden_states(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """What the output layer reads, after the final norm (batch, time, hidden)."""
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x, mask)
        result: Tensor = self.model.norm(x)
        return result

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Logits (batch, time, vocabulary)."""
        result: Tensor = self.lm_head(self.hidden_states(tokens, mask))
        return result


def checkpoint_weights(network: nn.Module) -> dict[str, Tensor]:
    """The parameters of a network, or of the MTP head, under the checkpoint's names."""
    block: int = CONFIG["moe_intermediate_size"]
    weights: dict[str, Tensor] = {}
    for name, tensor in network.state_dict().items():
        prefix, mlp, part = name.partition(".mlp.")
        if not mlp:
            weights[name] = tensor
        elif part == "router.weight":
            weights[f"{prefix}.mlp.shared_expert_gate.weight"] = tensor[:1]
            weights[f"{prefix}.mlp.gate.weight"] = tensor[1:]
        else:
            blocks = tensor.split(block, dim=1 if part.startswith("down") else 0)
            weights[f"{prefix}.mlp.shared_expert.{part}"] = blocks[0]
            for i, expert in enumerate(blocks[1:]):
                weights[f"{prefix}.mlp.experts.{i}.{part}"] = expert
    return weights


def network_weights(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The reverse of `checkpoint_weights`: what a network's `load_state_dict` takes."""
    merged: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        prefix, mlp, part = name.partition(".mlp.")
        base = f"{prefix}.mlp."
        if not mlp:
            merged[name] = tensor
        elif part == "gate.weight":
            gates = [weights[f"{base}shared_expert_gate.weight"], tensor]
            merged[f"{base}router.weight"] = torch.cat(gates)
        elif part.startswith("shared_expert."):
            part = part.removeprefix("shared_expert.")
            experts = range(int(CONFIG["num_experts"]))
            blocks = [tensor] + [weights[f"{base}experts.{i}.{part}"] for i in experts]
            merged[f"{base}{part}"] = torch.cat(
                blocks, dim=1 if part.startswith("down") else 0
            )
    return merged


def attention_mask(window: int, near: int, hidden: Tensor, reach: Tensor) -> Tensor:
    """Which key each query may attend to, (batch, 1, time, time).

    A query sees the last `window` tokens, and everything before them where
    `reach` (batch,) is true. Of the tokens marked in `hidden` (batch, time) it
    sees only the last `near`: those are the facts that the state must carry.
    """
    position = torch.arange(hidden.shape[1], device=hidden.device)
    distance = position[:, None] - position[None, :]
    inside = (distance < window) | reach[:, None, None]
    shown = (distance < near) | ~hidden[:, None, :]
    return ((distance >= 0) & inside & shown).unsqueeze(1)
