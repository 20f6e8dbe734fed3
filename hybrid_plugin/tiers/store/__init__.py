# SPDX-License-Identifier: Apache-2.0
"""Bundles as objects of a store that many servers share."""
