# SPDX-License-Identifier: Apache-2.0
"""Model classes written once and registered in every engine."""
