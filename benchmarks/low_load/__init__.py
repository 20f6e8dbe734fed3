# SPDX-License-Identifier: Apache-2.0
"""Few requests at a time: traffic, the sides that serve it, and what it tells."""
