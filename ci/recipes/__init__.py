# SPDX-License-Identifier: Apache-2.0
"""Published serving commands of hybrid models, taken through both engines."""
