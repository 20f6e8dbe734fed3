# SPDX-License-Identifier: Apache-2.0
"""Published serving commands: taken apart, tried, and written down."""
