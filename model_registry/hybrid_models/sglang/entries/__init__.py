# SPDX-License-Identifier: Apache-2.0
"""The package that SGLang imports as its external models.

It imports every module of it, and takes the classes in `EntryClass`.
"""
