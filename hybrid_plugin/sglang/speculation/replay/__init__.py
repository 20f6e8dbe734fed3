# SPDX-License-Identifier: Apache-2.0
"""Replay: what drafts do to states is recorded, and folded in once they are accepted.

SGLang keeps a state after each draft: for Qwen3-Next, in bfloat16, 39 MiB a draft and
running request, and so few requests run.  A record of the draft is 1.4 MiB.  It is
folded into the sequence's state right before the next step, not after its own: by then
it is known whether the answer ended, and where.  So turns end on exact states, with
nothing copied.
"""
