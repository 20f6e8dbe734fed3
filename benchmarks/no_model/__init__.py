# SPDX-License-Identifier: Apache-2.0
"""Engines that schedule and cache as they do in service, and compute nothing."""
