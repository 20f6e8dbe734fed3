# SPDX-License-Identifier: Apache-2.0
"""Where pages and states go beyond the device: files, without an engine or PyTorch."""
