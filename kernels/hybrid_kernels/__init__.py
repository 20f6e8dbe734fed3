# SPDX-License-Identifier: Apache-2.0
"""State kernels shared by the engine adapters and the model classes.

One folder per operation. Each folder's `__init__` is the public interface: it
checks shapes and picks the Triton kernel for tensors on a GPU and the plain
PyTorch reference for tensors on a CPU. Triton is imported only when a GPU
tensor is met.

`state_copy`
    gather, scatter, fork, zero and promote state slots.
`causal_conv1d`
    short depthwise convolution.
`gated_delta_rule`
    Gated DeltaNet (Qwen3-Next, Qwen3.5).
`ssd`
    Mamba-2.
`kda`
    Kimi Delta Attention: the delta rule with one decay per key channel.
`lightning_attention`
    linear attention with one decay per head, constant or of each token.
`rg_lru`
    the real-gated linear recurrent unit of Griffin.
`selective_scan`
    Mamba-1.
`gated_norm`
    the norm behind a layer, and the gate of its output, in either order.
`part_norm`
    norms of the parts of a row, such as Mamba-1's time steps, B and C.
`speculative`
    parent indices of draft trees.
`stops`
    where requests end among accepted drafts.
`replay`
    fold accepted drafts into main states, in all layers at once.

Sequences and slots
-------------------
Tokens of several sequences are packed along dimension 0; sequence `i` owns rows
``cu_seqlens[i]`` to ``cu_seqlens[i + 1]``. Sequences may be empty.

A *pool* holds one state per slot, slots along dimension 0, with any stride between
slots (beyond 2**31 elements too). Slot indices are int32 or int64 on the pool's
device; a negative index is a padding row, which reads a zero state and writes
nothing. An index at or above the number of slots is undefined behaviour on a GPU.

Engines pad batches with a slot that no sequence owns, mostly slot 0, once for each
padding row. This is safe: such a slot is the one that may repeat in `slots` and in
`draft_slots`. What it holds afterwards, and the outputs of its rows, are unspecified;
all other rows and slots keep their bits. A negative index saves reading and writing it.

Arithmetic is float32 whatever the input types; a state is rounded to the pool's
type only when it is written to a slot.

Every operation on tokens has three functions. They raise ValueError where shapes,
types or strides do not fit, and return `out`, or a new tensor shaped and typed like
the values. `N` is the number of sequences, `S` of slots.

``prefill`` runs packed sequences and leaves each one's state in its slot. It may
allocate; it never waits for the device. It takes

    cu_seqlens        ``[N + 1]``, int32 or int64, starting at 0. Rows after the last
                      sequence are padding; their output is unspecified.
    pool, slots       slots ``[N]``, no repeats among the non-negative.
    has_initial       ``[N]`` bool; False starts from zeros whatever the slot holds.
                      None means True for all.
    offsets           ``[N]``, int32 or int64, each in 0 to 63: tokens of the sequence
                      computed before this call, modulo 64. Chunks of 64 tokens, and
                      with them boundaries, then lie at absolute multiples of 64,
                      wherever the sequence goes on; its first chunk has
                      ``64 - offset`` tokens. None means zeros. Other values are
                      refused on a CPU, undefined behaviour on a GPU.
    boundary_slots    ``[N, C]``; the state after ``64 * (c + 1) - offset`` tokens of
                      sequence `n` is also written to ``boundary_slots[n, c]``.
                      Negative entries, and entries beyond the sequence, are skipped.
                      Not one of `slots`.
    round_boundaries  round the running state to the pool's type at each boundary, so
                      that resuming from one gives the bits of one long prefill.
                      Changes nothing for a float32 pool.
    out               written if given.

``update`` runs one new token per sequence and advances its state in place. With
`out` given it allocates nothing; it can be captured in a CUDA graph. It writes every
row of `out`, those of padding too.

``verify`` runs `L` draft tokens per sequence and leaves the main state as it is. What
it keeps is either a slot for the state after each draft, or a record from which
`replay.commit` folds accepted drafts into the main state, or nothing. On a GPU both
give the bits of `update` when the path to a draft is run token by token, with one
exception: packed chains of up to 8 tokens that leave a record are run in matrix form,
where heads decay as one. There sums are in another order, and a state is not rounded to
its pool's type between tokens. It can be captured like `update`. It takes

    pool, slots       slots ``[N]``, the main states; read only.
    draft_slots       ``[N, L]``; a negative entry keeps no state. For a chain
                      ``slots[i]`` may be among row `i`; otherwise all slots differ.
                      None keeps no states.
    parents           ``[N, L]``, the draft each draft follows, -1 for the main
                      state; parents come before children. With `draft_slots` they
                      keep their state in a slot; with `record` a state is computed
                      again along its path. None means a chain.
    cu_seqlens        ``[N + 1]``, int32 or int64: drafts of rows of different lengths
                      are packed along dimension 0, as `prefill` has tokens. Rows may
                      be empty. A row whose slot is negative is left out, however long
                      it is: its output is not written, so that `prefill` may run it.
                      Longer ones than tables and records have columns are refused on
                      a CPU, undefined behaviour on a GPU. None means `L` drafts in
                      every row.
    record            ``[R, L, size]``, `R` at least `N`: receives the drafts of row
                      `n` in ``record[n]``; `replay` says what it holds. Not together
                      with `draft_slots`.
    out               written if given; with `record` it may not overlap the tokens.

RG-LRU and Mamba-1 take neither `cu_seqlens` nor `record`, and need `draft_slots`.

Determinism
-----------
On a GPU a sequence's bits do not depend on the batch around it: no kernel picks a
block size or a split from the batch size or from other sequences' lengths, and none
uses atomics. With ``round_boundaries`` (or a float32 pool) they do not depend either
on whether a prefix was computed or restored at a boundary, nor on splits of a prompt
at boundaries. A split elsewhere goes on in the middle of a chunk: boundaries stay
where they are, but the bits of that chunk, and so of all behind it, are others.
"""
