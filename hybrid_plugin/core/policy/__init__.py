# SPDX-License-Identifier: Apache-2.0
"""What is decided: where snapshots are taken, what is evicted, who waits."""
