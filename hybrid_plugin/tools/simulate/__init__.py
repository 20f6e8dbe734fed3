# SPDX-License-Identifier: Apache-2.0
"""Request streams through the very same cache that serves the engines."""
