# SPDX-License-Identifier: Apache-2.0
"""Speed of `hybrid_kernels` beside its peers; run by ``benchmarks/kernels.py``."""
