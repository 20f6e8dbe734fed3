# SPDX-License-Identifier: Apache-2.0
"""Whether the installed engine is one that the model classes were written for."""

from __future__ import annotations

from collections.abc import Sequence

from hybrid_plugin.config import ConfigError


def unregistered(engine: str, problems: Sequence[str]) -> str | None:
    """Why our classes are not named to an engine, a sentence; None if they can be.

    Args:
        engine: its title.
        problems: what does not hold of how classes are named to it, a phrase each.
    """
    if not problems:
        return None
    return (
        f"hybrid-plugin's model classes are not registered: they do not fit this "
        f"{engine}: {problems[0]}."
    )


def require(engine: str, problems: Sequence[str]) -> None:
    """Refuse to build a model of layers that are not as we know them.

    Args:
        engine: its title.
        problems: what does not hold, a phrase each.

    Raises:
        ConfigError: naming each one.
    """
    if problems:
        raise ConfigError(
            f"hybrid-plugin's model classes do not fit this {engine}: "
            f"{'; '.join(problems)}. Install a version that they were tested with."
        )
