# SPDX-License-Identifier: Apache-2.0
"""State layers of our own model classes in SGLang, which run themselves.

They ask here what a pass is to keep in the middle of a prompt: SGLang builds pools and
runs layers in methods that see nothing of each other.
"""

from __future__ import annotations

from typing import Any, Final

from hybrid_plugin.device.interior import InteriorSnapshots

MARK: Final = "hybrid_plugin_model_class"
"""Attribute of configurations whose models our own classes run."""

_kept: InteriorSnapshots | None = None


def is_own(config: Any) -> bool:
    """Whether our own class runs a model.

    Args:
        config: of the model.
    """
    return bool(getattr(type(config), MARK, False))


def have_kept(interior: InteriorSnapshots | None) -> None:
    """Have the layers of this process keep what is ordered there; None for nothing."""
    global _kept
    _kept = interior


def interior() -> InteriorSnapshots | None:
    """What the next pass is to keep; None where passes keep nothing."""
    return _kept
