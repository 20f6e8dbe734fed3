# SPDX-License-Identifier: Apache-2.0
"""One file for each architecture, written over the layers of a kit."""
