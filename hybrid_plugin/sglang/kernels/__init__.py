# SPDX-License-Identifier: Apache-2.0
"""SGLang's state layers on our kernels, where the option `kernels` says so.

`choice` says which kind of state layers a model has, `state_layers` who runs them,
`passes` what a forward pass does with its sequences.  One module per kind of layer
translates SGLang's call to `hybrid_plugin.mixers`; `patches` sets them as hooks.
"""
