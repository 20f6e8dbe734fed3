# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding with the plugin's cache.

A sequence that verifies drafts has a row of state slots: its own in column 0, and one
for each draft behind it.  The state after the pass's token `t` lands in column `t`; the
next pass goes on from the column of the last token that was accepted.  The inputs of
the convolutions stay in the first slot, in a window wider by one for each draft.

* `serving`: with which drafts and models that works.
* `steps`: what the cache is told: slots for drafts, what was verified, what accepted.
* `block_tables`: the columns, in the tables of vLLM's model runners.
* `windows`: the inputs of the convolutions, likewise.
* `stop_cut`: accepted drafts behind a request's end, where steps are scheduled ahead.
* `patches`: what vLLM itself gets wrong there.
"""
