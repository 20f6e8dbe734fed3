# SPDX-License-Identifier: Apache-2.0
"""Classes of models are looked at in the tests' own process.

vLLM does so in another one, which imports all of vLLM first, unless this machine has
seen the model: so that no GPU is initialised.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest


@pytest.fixture(scope="session", autouse=True)
def _no_process_per_model() -> Iterator[None]:
    if find_spec("vllm") is None:
        yield
        return
    from vllm.model_executor.models import registry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_run_in_subprocess", lambda look: look())
        yield
