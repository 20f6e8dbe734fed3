# SPDX-License-Identifier: Apache-2.0
"""The commands that need no running engine: plan, simulate, doctor, demo."""
