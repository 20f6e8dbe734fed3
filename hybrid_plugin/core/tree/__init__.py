# SPDX-License-Identifier: Apache-2.0
"""The radix tree: what it is made of, and what it tells of its pages."""
