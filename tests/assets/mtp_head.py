# SPDX-License-Identifier: Apache-2.0
"""The bundled model's MTP head, built from transformers' parts, and run as engines do.

transformers has no MTP head of Qwen3-Next.  This one reads the same tensors as vLLM
and SGLang, and drafts with one step for each token and a key-value cache.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextDecoderLayer,
    Qwen3NextRMSNorm,
    Qwen3NextRotaryEmbedding,
)


class MtpHead(nn.Module):
    """Drafts for one sequence."""

    def __init__(self, model: Any) -> None:
        """Take the shape, embeddings and output layer of a `Qwen3NextForCausalLM`."""
        super().__init__()
        config = copy.deepcopy(model.config)
        config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
        self._config = config
        self._shared = (model.model.embed_tokens, model.lm_head)
        size = config.hidden_size
        self.pre_fc_norm_embedding = Qwen3NextRMSNorm(size, eps=config.rms_norm_eps)
        self.pre_fc_norm_hidden = Qwen3NextRMSNorm(size, eps=config.rms_norm_eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList([Qwen3NextDecoderLayer(config, layer_idx=0)])
        self.norm = Qwen3NextRMSNorm(size, eps=config.rms_norm_eps)
        self._rotary = Qwen3NextRotaryEmbedding(config=config)

    def load(self, path: Path) -> None:
        """Load the checkpoint's tensors, all of them and no others.

        Raises:
            RuntimeError: if a tensor is missing, left over or of another shape.
        """
        self.load_state_dict(fuse_experts(load_file(path)))

    def _run(self, hidden: Tensor, tokens: Sequence[int], cache: Any) -> Tensor:
        """Run n positions after those in `cache`; `tokens` follow them."""
        first = cache.get_seq_length()
        positions = torch.arange(first, first + len(tokens))[None]
        embedded = self._shared[0](torch.tensor([list(tokens)]))
        both = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)]
        x = self.fc(torch.cat(both, dim=-1))
        x = self.layers[0](
            x,
            position_embeddings=self._rotary(x, positions),
            position_ids=positions,
            past_key_values=cache,
        )
        out: Tensor = self.norm(x)
        return out

    @torch.no_grad()
    def drafts(
        self, hidden: Tensor, tokens: Sequence[int], first: int, count: int
    ) -> dict[int, list[int]]:
        """What is drafted after each token from number `first` on.

        Args:
            hidden: the model's last hidden states, after its final norm, of all
                tokens (1, n, hidden).
            tokens: the sequence, n tokens.
            first: the first token after which to draft; at least 1.
            count: how many drafts follow each other.

        Returns:
            `count` drafts of the tokens after t, for each t in `first` .. n - 1.
        """
        cache = DynamicCache(config=self._config)
        out = self._run(hidden[:, :-1], tokens[1:], cache)
        drafted = {}
        for token in range(len(tokens) - 1, first - 1, -1):
            # keep the keys that this token's chain sees, one for each token before it
            if later := cache.get_seq_length() - token:
                cache.crop(-later)
            state = out[:, token - 1 : token]
            said = [self._say(state)]
            while len(said) < count:
                state = self._run(state, said[-1:], cache)
                said.append(self._say(state))
            drafted[token] = said
        return drafted

    def _say(self, state: Tensor) -> int:
        return int(self._shared[1](state)[0, -1].argmax())


def fuse_experts(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Drop the prefix, and join each expert's tensors as transformers keeps them."""
    own = {name.removeprefix("mtp."): tensor for name, tensor in weights.items()}
    fused = {name: tensor for name, tensor in own.items() if ".experts." not in name}
    base = "layers.0.mlp.experts."
    count = len([name for name in own if name.endswith("down_proj.weight")]) - 1

    def stack(part: str) -> Tensor:
        return torch.stack([own[f"{base}{i}.{part}.weight"] for i in range(count)])

    gate_up = [stack("gate_proj"), stack("up_proj")]
    fused[f"{base}gate_up_proj"] = torch.cat(gate_up, dim=1)
    fused[f"{base}down_proj"] = stack("down_proj")
    return fused


def accepted(
    drafted: Mapping[int, Sequence[int]], tokens: Sequence[int], prompt: int
) -> list[int]:
    """How many drafts each verification accepts, after a prompt of so many tokens.

    A verification whose drafts go beyond the sequence is left out.
    """
    counts, at = [], prompt
    while at in drafted and at + len(drafted[at]) < len(tokens):
        said, true = drafted[at], tokens[at + 1 :]
        run = 0
        while run < len(said) and said[run] == true[run]:
            run += 1
        counts.append(run)
        at += run + 1
    return counts
