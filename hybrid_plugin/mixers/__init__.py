# SPDX-License-Identifier: Apache-2.0
"""State layers on `hybrid_kernels`, equal for every engine.

One module per kind of layer.  Each has a record of the layer's weights, and two
functions: `prefill` for packed sequences, described by `Prefills`, and `decode` for one
token per sequence.  Projections and norms stay the engine's.
"""
