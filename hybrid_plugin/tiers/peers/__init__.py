# SPDX-License-Identifier: Apache-2.0
"""Peers: servers that read each other's host memory, by NIXL."""
