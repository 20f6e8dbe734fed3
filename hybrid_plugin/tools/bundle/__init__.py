# SPDX-License-Identifier: Apache-2.0
"""Looks after folders of bundles from the command line."""
