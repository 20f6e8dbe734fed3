# SPDX-License-Identifier: Apache-2.0
"""Tiers behind the device's memory: what is kept there, and brought back."""
