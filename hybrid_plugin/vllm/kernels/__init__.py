# SPDX-License-Identifier: Apache-2.0
"""Our kernels in vLLM's state layers, where the option `kernels` asks for them.

`state_layers` takes a worker's layers over, `layers` knows which are ours.  What it
knows hangs on vLLM's layers, so two engines in one process do not disturb each other.
`passes` describes a forward pass to the mixers once; the description hangs on vLLM's
metadata of the pass.  One module per kind of layer takes both to
`hybrid_plugin.mixers`.  `agreement` has all ranks and the engine core know whether
passes keep states in the middle of a prompt.

The hooks that lead here are in `hybrid_plugin.vllm.patches`.
"""
