# SPDX-License-Identifier: Apache-2.0
"""Tensors: the memory of the pools, and the commands that run on it."""
