# SPDX-License-Identifier: Apache-2.0
"""Whether an engine's logprobs depend on anything but the prompt."""
