# SPDX-License-Identifier: Apache-2.0
"""Saves, loads, lists and removes sessions from the command line."""
