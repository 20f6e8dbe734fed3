# SPDX-License-Identifier: Apache-2.0
"""Model classes written once and registered in every engine.

For hybrid architectures that vLLM, SGLang or both lack.  `catalogue` names them;
`architectures` has one file for each, written over the layers of a `kit.Kit`; `mixers`
has their state layers, on the kernels of `hybrid_kernels`; `blocks` what they share
besides.  `vllm` and `sglang` make engines' layers a kit and register the classes: what
an engine brings itself always wins.
"""
