# SPDX-License-Identifier: Apache-2.0
"""The MTP head of the tiny model: one layer that drafts the token after the next.

Its tensors are those of published Qwen3-Next checkpoints (`mtp.*`), which both
engines load.  At position t it reads the backbone's hidden state of position t,
after the final norm, and the embedding of token t + 1, and predicts token t + 2;
embeddings and output layer are the backbone's.  A second draft is made by the
same layer from its own output at the first, and so on.
"""

from __future__ import annotations

import torch
from network import HIDDEN, Layer, Linear, Network, Norm
from torch import Tensor, nn
from torch.nn import functional


class Head(nn.Module):
    """Everything under the checkpoint's `mtp.` prefix."""

    def __init__(self) -> None:
        super().__init__()
        self.pre_fc_norm_embedding = Norm(HIDDEN)
        self.pre_fc_norm_hidden = Norm(HIDDEN)
        self.fc = Linear(2 * HIDDEN, HIDDEN)
        self.layers = nn.ModuleList([Layer("full_attention")])
        self.norm = Norm(HIDDEN)

    def start_from(self, backbone: Network) -> None:
        """Begin as the backbone's last layer, fed with the mean of both inputs."""
        self.layers[0].load_state_dict(backbone.model.layers[-1].state_dict())
        self.norm.load_state_dict(backbone.model.norm.state_dict())
        with torch.no_grad():
            self.fc.weight.copy_(torch.eye(HIDDEN).repeat(1, 2) / 2)

    def forward(self, hidden: Tensor, embedded: Tensor, drafts: int) -> list[Tensor]:
        """Make `drafts` drafts from every position, all positions at once.

        Args:
            hidden: of the backbone at positions 0 to T - 1 (batch, T, hidden).
            embedded: embeddings of tokens 1 to T (batch, T, hidden).
            drafts: how many follow each other.

        Returns:
            For each draft j, from 0, what the output layer reads to predict token
            t + 2 at position t, in the chain that began at position t - j, which
            positions below j lack.
        """
        layer = self.layers[0]
        inputs, keys, values, outputs = hidden, [], [], []
        for _ in range(drafts):
            both = [
                self.pre_fc_norm_embedding(embedded),
                self.pre_fc_norm_hidden(inputs),
            ]
            x = self.fc(torch.cat(both, dim=-1))
            q, k, v, gate = layer.self_attn.project(layer.input_layernorm(x))
            keys.append(k)
            values.append(v)
            mixed = chain_attention(q, keys, values).transpose(1, 2).flatten(2)
            x = x + layer.self_attn.o_proj(mixed * gate)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            outputs.append(self.norm(x))
            inputs = later(outputs[-1], 1)
        return outputs


def later(x: Tensor, steps: int) -> Tensor:
    """`x` moved to later positions (dimension -2); zeros come in."""
    return functional.pad(x[..., : x.shape[-2] - steps, :], (0, 0, steps, 0))


def chain_attention(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """The last draft's attention, at every position (batch, heads, T, dim).

    As in the engines, a chain that began at position b sees the keys of the first
    draft up to b, and of each later draft the key that it has written itself: of
    draft i, at position b + i.
    """
    b, heads, time, dim = q.shape
    draft = len(keys) - 1
    groups = q.view(b, keys[0].shape[1], -1, time, dim)
    k, v = (x.unsqueeze(2) for x in (keys[0], values[0]))
    open_ = torch.ones(time, time, dtype=torch.bool, device=q.device).tril(-draft)
    open_[:draft, 0] = True  # positions without a chain see something too
    scores = (groups @ k.transpose(-1, -2)).masked_fill(~open_, float("-inf"))
    own = [later(x, draft - i).unsqueeze(2) for i, x in enumerate(keys)][1:]
    each = [scores, *((groups * x).sum(-1, keepdim=True) for x in own)]
    share = (torch.cat(each, dim=-1) * dim**-0.5).softmax(-1)
    out = share[..., :time] @ v
    for i, x in enumerate(values[1:], start=1):
        column = share[..., time + i - 1, None]
        out = out + column * later(x, draft - i).unsqueeze(2)
    return out.reshape(b, heads, time, dim)
