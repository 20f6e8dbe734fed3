# SPDX-License-Identifier: Apache-2.0
"""Parts of the benchmark of one server that computes prompts and one that answers."""
