# SPDX-License-Identifier: Apache-2.0
"""Forward passes of a real engine: counted where they run, read by who measures."""
