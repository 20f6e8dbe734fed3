# SPDX-License-Identifier: Apache-2.0
"""State layers: projections of a kit around the mixers of `hybrid_plugin.mixers`."""
