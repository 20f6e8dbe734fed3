# SPDX-License-Identifier: Apache-2.0
"""Ids of pages and slots, who refers to them, and who makes room for whom."""
