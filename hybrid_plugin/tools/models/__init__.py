# SPDX-License-Identifier: Apache-2.0
"""Which hybrid architectures are served, by whose class, and why others are not."""
