# SPDX-License-Identifier: Apache-2.0
"""Parts of layers that architectures share, and that keep no state."""
