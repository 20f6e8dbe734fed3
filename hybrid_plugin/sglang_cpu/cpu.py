# SPDX-License-Identifier: Apache-2.0
"""The platform class that SGLang instantiates."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

from hybrid_plugin.sglang_cpu import (
    adapters,
    draft_blocks,
    draft_tokens,
    kernels,
    transfers,
)
from hybrid_plugin.sglang_cpu.compressed_keys import choose_as_few_as_asked
from hybrid_plugin.sglang_cpu.replacements import EMBEDS

_SAVES_NOTHING = "saves_nothing"
"""Mark of what stands in for a memory saver."""


class HybridCpu(CpuDeviceMixin, SRTPlatform):
    """A CPU, as a platform of its own.

    SGLang's in-tree CPU platform is another road: it takes kernels compiled for
    AMX, and has none of the state tracking that prefix caching needs.
    """

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Set what suits a CPU; SGLang records it as the platform's default."""
        leave_the_cores_when_idle(server_args)
        keep_inputs_in_float32(server_args)
        mix_streams_in_torch()
        choose_as_few_as_asked()
        wait_for_no_gpu_s_dump()
        transfers.prepare(server_args)
        adapters.adapt_in_torch(server_args)
        draft_blocks.take_dspark()
        save_no_memory_of_sglang_s()

    def get_device(self, device_id: int = 0) -> str:
        """Name the device, where a caller gave none.

        Symptom: without `--device`, "'torch.device' object has no attribute 'split'".
        Cause: the base class's and its CPU mixin's types differ.
        Fix: the base class's.
        Delete when: they agree.
        """
        return "cpu"

    def get_default_attention_backend(self) -> str:
        """PyTorch's scaled dot product attention."""
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        """SGLang's fused operations run in their PyTorch form."""
        return "native"

    def support_mamba_cache_extra_buffer(self) -> bool:
        """State tracking is among the kernels that `init_backend` supplies."""
        return True

    def is_pin_memory_available(self, device: torch.device | None = None) -> bool:
        """There is no device to copy to."""
        return False

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        """Those whose drafts SGLang verifies with kernels that ours replace."""
        return algorithm in ("EAGLE", "EAGLE3", "STANDALONE", "DFLASH", "DSPARK")

    def supports_speculative_draft_attention_backend(
        self, algorithm: str, backend: str
    ) -> bool:
        """PyTorch's, as for the model itself."""
        return backend == self.get_default_attention_backend()

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        """The same."""
        return self.get_default_attention_backend()

    def get_speculative_cache_locs_fn(self) -> Callable[..., torch.Tensor]:
        """Where the tokens of drafts lie."""
        return draft_tokens.positions_of_rows

    def get_speculative_worker_cls(self, algorithm: str) -> type | None:
        """Keep SGLang's worker, with embeddings in the model's type.

        Raises:
            ConfigError: naming what this SGLang moved.
        """
        if algorithm == "DFLASH":
            kernels.require([EMBEDS])
            draft_blocks.embed_in_the_models_type()
        return None

    def init_backend(self) -> None:
        """Put our kernels in the place of SGLang's, and leave the rest a core.

        Raises:
            ConfigError: naming each kernel that this SGLang moved.
        """
        kernels.install()
        leave_a_core()
        save_no_memory_of_sglang_s()
        transfers.register_memory_of_the_cpu()


def leave_the_cores_when_idle(server_args: Any) -> None:
    """Symptom: a server without requests keeps a core busy.

    Cause: its scheduler looks for requests without a pause, which costs little
    where a GPU does the work.
    Fix: `--sleep-on-idle`.
    Delete when: that is SGLang's default.
    """
    server_args.sleep_on_idle = True


def keep_inputs_in_float32(server_args: Any) -> None:
    """Symptom: with `--dtype float32` and `extra_buffer`, the first prefill fails,
    "Index put requires the source and destination dtypes match".

    Cause: the convolution states' type comes from the environment and is bfloat16
    without it, and tracking assigns inputs to states without a conversion.
    Fix: say float32 in the environment, which scheduler processes inherit, unless
    the user said something.
    Delete when: SGLang derives the type from the model's, or converts.
    """
    if server_args.dtype in ("float", "float32"):
        os.environ.setdefault("SGLANG_MAMBA_CONV_DTYPE", "float32")


def mix_streams_in_torch() -> None:
    """Symptom: a model with several residual streams fails in float32, and would in
    any type.

    Cause: they are mixed by kernels that are compiled for a GPU, unless the
    environment says otherwise.
    Fix: say so in the environment, unless the user said something; SGLang has a form
    in PyTorch.
    Delete when: SGLang asks its platform.
    """
    for way in ("PRE", "POST"):
        os.environ.setdefault(f"SGLANG_OPT_USE_TILELANG_MHC_{way}", "0")


def wait_for_no_gpu_s_dump() -> None:
    """Symptom: a server that cannot start takes a minute to say so.

    Cause: before it ends, it waits for the core dump of a CUDA device.
    Fix: ask for none in the environment, unless the user said something.
    Delete when: SGLang looks for a CUDA device first.
    """
    os.environ.setdefault("SGLANG_CUDA_COREDUMP_BEFORE_CRASH", "0")


def save_no_memory_of_sglang_s() -> None:
    """Symptom: with `--enable-memory-saver` no process of a server starts.

    Cause: SGLang's memory saver replaces CUDA's allocator.
    Fix: none of SGLang's own memory is saved; the plugin gives back that of its pools.
    Delete when: the memory saver knows devices without CUDA.
    """
    from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter

    create = TorchMemorySaverAdapter.create
    if not hasattr(create, _SAVES_NOTHING):

        def without(enable: bool) -> Any:
            return create(enable=False)

        setattr(without, _SAVES_NOTHING, True)
        TorchMemorySaverAdapter.create = staticmethod(without)


def leave_a_core() -> None:
    """Symptom: a token takes a second instead of ten milliseconds.

    Cause: PyTorch computes with as many threads as there are cores, and waits for
    all of them after each of the many small operations of a step, while SGLang's
    other processes and its client take turns on the same cores.
    Fix: a thread less, unless OMP_NUM_THREADS says how many.
    Delete when: SGLang binds the threads of out-of-tree CPU platforms.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) - 1))
