# SPDX-License-Identifier: Apache-2.0
"""Hit tokens over memory: the same requests for several caches at equal bytes."""
