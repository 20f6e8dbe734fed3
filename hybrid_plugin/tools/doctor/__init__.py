# SPDX-License-Identifier: Apache-2.0
"""`hybrid-plugin doctor`: would serving work here, and if not, why not?"""
