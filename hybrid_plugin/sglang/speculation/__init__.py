# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding with the plugin on.

SGLang verifies drafts in a scratch: the state after each of them goes to a row of it,
and once it is known which were accepted, one state is copied to the sequence's slot.
So slots are exact after every step, and only what ends between a step's launch and its
result needs more: its state is taken from the scratch.
"""
