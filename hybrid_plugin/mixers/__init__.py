# SPDX-License-Identifier: Apache-2.0
"""State layers on `hybrid_kernels`, equal for every engine.

One module per kind of layer.  Each has a record of the layer's weights, and functions:
`prefill` for packed sequences, described by `Prefills`; `decode` for one token per
sequence; and, where engines verify drafts in such layers, `verify` for what
`Verifications` describes.  Projections and norms stay the engine's.
"""
