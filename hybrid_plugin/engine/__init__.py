# SPDX-License-Identifier: Apache-2.0
"""What both adapters need, and no engine is imported for."""
