# SPDX-License-Identifier: Apache-2.0
"""Pieces used by several operations; not public."""
