# SPDX-License-Identifier: Apache-2.0
"""Rows in which drafts are verified: held for every batch that may come, then given.

The device under these tests has no memory behind rows that are not mapped, and knows
which rows steps in flight still write: see `Steps`.
"""
