# SPDX-License-Identifier: Apache-2.0
"""A small router for prefill and decode servers, for demos and tests."""
