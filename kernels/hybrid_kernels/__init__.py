# SPDX-License-Identifier: Apache-2.0
"""State kernels shared by the engine adapters and the model classes.

One folder per operation. Each folder's `__init__` is the public interface: it
checks shapes and picks the Triton kernel for tensors on a GPU and the plain
PyTorch reference for tensors on a CPU. Triton is imported only when a GPU
tensor is met.

`state_copy`
    gather, scatter, fork, zero and promote state slots.
`causal_conv1d`
    short depthwise convolution: prefill, decode update, draft verify.
`gated_delta_rule`
    Gated DeltaNet (Qwen3-Next, Qwen3.5): prefill, decode update, draft verify.
`ssd`
    Mamba-2: prefill, decode update, draft verify.
`kda`
    Kimi Delta Attention: the delta rule with one decay per key channel.
`lightning_attention`
    linear attention with one constant decay per head.
`rg_lru`
    the real-gated linear recurrent unit of Griffin.
`selective_scan`
    Mamba-1.
`speculative`
    parent indices of draft trees.

Conventions shared by all operations:

* Tokens of several sequences are packed along dimension 0; sequence `i` owns
  rows `cu_seqlens[i]` to `cu_seqlens[i + 1]`. Sequences may be empty.
* A *pool* holds one state per slot, slots along dimension 0, with any stride
  between slots (beyond 2**31 elements too). Slot indices are int32 or int64 on
  the pool's device; a negative index is a padding row, which reads a zero state
  and writes nothing.
* Arithmetic is float32 whatever the input types; a state is rounded to the
  pool's type only when it is written to a slot.
* A sequence's result does not depend on the batch around it: no kernel picks a
  block size or a split from the batch size or from other sequences' lengths.
"""
