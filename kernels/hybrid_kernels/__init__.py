# SPDX-License-Identifier: Apache-2.0
"""State kernels shared by the engine adapters and the model classes."""
