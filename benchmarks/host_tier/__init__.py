# SPDX-License-Identifier: Apache-2.0
"""Parts of the benchmark of host memory behind a device cache that is too small."""
