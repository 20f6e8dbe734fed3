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
            positions below j lack.  As in the engines, a chain sees keys of the
            backbone's hidden states up to where it began, then its own.
        """
        layer = self.layers[0]
        inputs, keys, values, outputs = hidden, [], [], []
        for draft in range(drafts):
            x = self.fc(
                torch.cat(
                    [
                        self.pre_fc_norm_embedding(embedded),
                        self.pre_fc_norm_hidden(inputs),
                    ],
                    dim=-1,
                )
            )
            q, k, v, gate = layer.self_attn.project(layer.input_layernorm(x))
            keys.append(k)
            values.append(v)
            x = x + layer.self_attn.attend(
                q,
                torch.cat(keys, dim=2),
                torch.cat(values, dim=2),
                gate,
                chain_mask(x.shape[1], draft, x.device),
            )
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            outputs.append(self.norm(x))
            inputs = functional.pad(outputs[-1][:, :-1], (0, 0, 1, 0))
        return outputs


def chain_mask(time: int, draft: int, device: torch.device) -> Tensor:
    """Which keys draft number `draft` sees: (1, 1, time, (draft + 1) * time).

    Of the keys of the backbone's hidden states those up to position t - draft; of
    each earlier draft, and of this one, the key that its own chain has written.
    """
    position = torch.arange(time, device=device)
    distance = position[:, None] - position[None, :]
    own = [distance == draft - j for j in range(1, draft + 1)]
    # Positions before the first chain see a key too, or their softmax has none.
    first = (distance >= draft) | ((distance == 0) & (position[:, None] < draft))
    return torch.cat([first, *own], dim=1)[None, None]
