# SPDX-License-Identifier: Apache-2.0
"""A rank's side of the host tier: memory, rows, and copies from and to the device."""
