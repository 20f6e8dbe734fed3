# SPDX-License-Identifier: Apache-2.0
"""The bundled model with states as large, beside its KV, as those of real models.

A state of Qwen3-Next has the bytes of 1,600 tokens of KV; one of the bundled model
those of 400.  Here each gated delta net gets more value heads, whose values and outputs
have zeros for weights: their states are as large as the others', and stay zero, so that
all answers remain those of the bundled model.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

TIMES = 4
"""So many times the value heads: a state then has the bytes of 1,600 tokens of KV."""
_TENSOR = ".linear_attn."


@dataclass(frozen=True)
class Heads:
    """Of a gated delta net."""

    key: int
    value: int
    key_dim: int
    value_dim: int

    @property
    def group(self) -> int:
        """Value heads of a key head."""
        return self.value // self.key


def write(source: Path, folder: Path) -> Path:
    """Write the model, unless it is there already.

    Args:
        source: folder of a Qwen3-Next checkpoint in one file.
        folder: to write to; returned.

    Raises:
        ValueError: if the source is a model of another kind.
    """
    from safetensors.torch import load_file, save_file

    if (folder / "config.json").is_file():
        return folder
    config = json.loads((source / "config.json").read_text())
    if config.get("model_type") != "qwen3_next":
        raise ValueError(
            f"--large-states widens the bundled model, and {source} is a "
            f"{config.get('model_type')}: leave one of the two out."
        )
    heads = Heads(
        config["linear_num_key_heads"],
        config["linear_num_value_heads"],
        config["linear_key_head_dim"],
        config["linear_value_head_dim"],
    )
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            shutil.copy(file, folder)
    tensors = load_file(source / "model.safetensors")
    wider = {name: widened(name, tensor, heads) for name, tensor in tensors.items()}
    save_file(wider, folder / "model.safetensors", metadata={"format": "pt"})
    config["linear_num_value_heads"] = heads.value * TIMES
    # Last: a folder with it is whole.
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return folder


def widened(name: str, tensor: torch.Tensor, heads: Heads) -> torch.Tensor:
    """A tensor of the wider model.

    Args:
        name: of the tensor.
        tensor: of the model as it is, with its value heads in the order of key heads.
        heads: of the model as it is.
    """
    if _TENSOR not in name:
        return tensor
    part = name.partition(_TENSOR)[2]
    q = k = heads.key_dim
    v = heads.value_dim * heads.group
    if part == "in_proj_qkvz.weight":
        return _widen_rows(tensor, heads, (q, k, v, v), (2, 3))
    if part == "in_proj_ba.weight":
        return _widen_rows(tensor, heads, (heads.group,) * 2, (0, 1))
    if part in ("A_log", "dt_bias"):
        return _widen_rows(tensor, heads, (heads.group,), (0,))
    if part == "out_proj.weight":
        rows = _widen_rows(tensor.t().contiguous(), heads, (v,), (0,))
        return rows.t().contiguous()
    if part == "conv1d.weight":
        import torch

        keys = 2 * heads.key * heads.key_dim
        values = _widen_rows(tensor[keys:], heads, (v,), (0,))
        return torch.cat([tensor[:keys], values])
    return tensor


def _widen_rows(
    tensor: torch.Tensor,
    heads: Heads,
    parts: tuple[int, ...],
    widened_parts: tuple[int, ...],
) -> torch.Tensor:
    """Append zeros to some of the parts that the rows of each key head have.

    Args:
        tensor: ``[key heads * sum(parts), ...]``.
        heads: of the model as it is.
        parts: rows of each.
        widened_parts: which of them get `TIMES` as many rows.
    """
    import torch

    found = []
    for head in tensor.split(sum(parts)):  # type: ignore[no-untyped-call]
        for number, part in enumerate(head.split(parts)):
            found.append(part)
            if number in widened_parts:
                more = (len(part) * (TIMES - 1), *part.shape[1:])
                found.append(part.new_zeros(more))
    assert len(tensor) == heads.key * sum(parts), "rows are those of the key heads"
    return torch.cat(found)
