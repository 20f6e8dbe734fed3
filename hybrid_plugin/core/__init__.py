# SPDX-License-Identifier: Apache-2.0
"""The engine-neutral cache: decides which page and slot holds what, and when.

Nothing here imports an engine; only `arena` and `executor` touch torch.
"""
