# SPDX-License-Identifier: Apache-2.0
"""The first rank of a model, built without its peers or weights.

What a rank keeps of a sequence depends on how many ranks there are, and not on what
they say: no collective runs while layers are made.  So a process alone makes groups of
one, and has vLLM's groups of tensor-parallel ranks and of stages tell other sizes
meanwhile.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING

from hybrid_plugin.vllm.context_parallel import page_ranks

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig


@contextmanager
def built(config: VllmConfig) -> Iterator[None]:
    """Make the layers of rank 0, those of a draft model too; they enter the
    configuration.

    Some ask for the number of ranks again when they are asked for their caches: that is
    to be done within.

    Raises:
        Exception: whatever the model's code raises.
    """
    import torch
    from vllm.config.vllm import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    _make_groups_of_one()
    _make_workspace()
    with _told(config.parallel_config):
        with (
            set_current_vllm_config(config),
            set_default_torch_dtype(config.model_config.dtype),
            torch.device("meta"),
            _without_exchanges(config),
        ):
            initialize_model(config)
            _make_draft_layers(config)
        yield


def _make_draft_layers(config: VllmConfig) -> None:
    """Make the layers of what proposes drafts, whose KV is in the pages too."""
    from vllm.config.utils import replace
    from vllm.config.vllm import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    drafting = config.speculative_config
    if drafting is None or not (drafting.use_eagle() or drafting.uses_draft_model()):
        return
    model, own = drafting.draft_model_config, drafting.apply_draft_overrides(config)
    stands_alone = drafting.uses_draft_model()
    own = replace(own, model_config=model) if stands_alone else copy(own)
    # Heads of quantised models are often not quantised, which only their weights tell.
    # It changes nothing of what is kept of a sequence.
    own.quant_config = None
    with set_current_vllm_config(own), set_default_torch_dtype(model.dtype):
        prefix = "draft_model" if stands_alone else ""
        initialize_model(own, prefix=prefix, model_config=model)


def _make_groups_of_one() -> None:
    """Initialise what is distributed, without the peers that a server would have."""
    from vllm.config.vllm import VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )

    # Of the server's configuration vLLM would take the data-parallel ranks, and wait
    # for them.
    with (
        tempfile.TemporaryDirectory() as folder,
        set_current_vllm_config(VllmConfig()),
    ):
        meeting_point = f"file://{Path(folder, 'rank0')}"
        init_distributed_environment(1, 0, meeting_point, 0, "gloo")
        ensure_model_parallel_initialized(1, 1)


def _make_workspace() -> None:
    """Give layers the scratch memory that a worker would have, without any."""
    import torch
    from vllm.v1.worker import workspace

    if not workspace.is_workspace_manager_initialized():
        workspace.init_workspace_manager(torch.device("meta"))


@contextmanager
def _without_exchanges(config: VllmConfig) -> Iterator[None]:
    """Make nothing by which ranks that share out latent KV exchange what they read: it
    takes memory in common with the peers, and keeps nothing of a sequence."""
    if page_ranks(config) == 1:
        yield
        return
    from vllm.v1.attention.ops.dcp import MLADCPManager

    make = MLADCPManager.__init__
    MLADCPManager.__init__ = _make_nothing
    try:
        yield
    finally:
        MLADCPManager.__init__ = make


def _make_nothing(*_: object, **__: object) -> None:
    """In place of an initializer."""


@contextmanager
def _told(parallel: ParallelConfig) -> Iterator[None]:
    """Have layers cut their heads for as many tensor-parallel ranks as there would be,
    and the model make those of its first stage alone.

    Experts are cut likewise, though a server may deal them out: a table says where each
    is, and tables cannot be read without memory.  They keep nothing of a sequence.
    """
    import torch
    from vllm.distributed import get_pp_group, get_tp_group

    stages = get_pp_group()
    before = stages.world_size
    stages.world_size = parallel.pipeline_parallel_size
    group, dealt_out = get_tp_group(), parallel.enable_expert_parallel
    device, size = group.device, group.world_size
    group.device = torch.device("meta")  # where layers are made
    group.world_size = parallel.tensor_parallel_size
    parallel.enable_expert_parallel = False
    try:
        yield
    finally:
        group.device, group.world_size = device, size
        stages.world_size = before
        parallel.enable_expert_parallel = dealt_out
