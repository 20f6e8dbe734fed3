# SPDX-License-Identifier: Apache-2.0
"""How our kernels refuse what they do not compute."""

from __future__ import annotations


def refuse(what: str, **arguments: object) -> None:
    """Let None and False pass.

    Args:
        what: names the feature of SGLang that sets the arguments.
        arguments: of a kernel, by name.

    Raises:
        NotImplementedError: if an argument is set.
    """
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise NotImplementedError(
                f"SGLang on the platform hybrid_cpu does not support {what} (kernel "
                f"argument {name}); run without it, or on a GPU."
            )
