# SPDX-License-Identifier: Apache-2.0
"""`hybrid-plugin top`: what the cache of a running server does, in the terminal."""
