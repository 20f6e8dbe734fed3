# SPDX-License-Identifier: Apache-2.0
"""Which versions of which engines are supported, and how that is checked."""
