# SPDX-License-Identifier: Apache-2.0
"""What a model needs of the cache, and what fits into a given memory."""
