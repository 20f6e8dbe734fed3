# SPDX-License-Identifier: Apache-2.0
"""Why tokens of an admitted prompt were computed although there is a cache."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum

from hybrid_plugin.core.sequence import LookUp
from hybrid_plugin.core.tree.radix import MambaRadixCache, Match


class MissReason(StrEnum):
    """Why tokens were computed; see `docs/monitoring.md`."""

    NEW = "new"
    """Nobody had computed them here, as far as that is remembered."""
    NO_SNAPSHOT = "no_snapshot"
    """Their KV is there, but no state was kept at or behind them."""
    STATE_EVICTED = "state_evicted"
    """Their KV is there, but the state at or behind them was evicted."""
    KV_EVICTED = "kv_evicted"
    """They were there, and were evicted."""
    OTHER_NAMESPACE = "other_namespace"
    """They begin like what is there under another adapter or cache salt."""
    TOO_SHORT = "too_short"
    """The prompt has no whole page before its last token."""
    NOT_CACHEABLE = "not_cacheable"
    """The request must not be served from the cache."""

    # Reasons are counted at each admission; the hash of Enum is no built-in function.
    __hash__ = str.__hash__


def missed_tokens(tree: MambaRadixCache, found: LookUp) -> Counter[MissReason]:
    """Tokens of a prompt that must be computed, by reason; they add up to all of them.

    Call it before the admission changes the tree.  Takes time linear in what was
    evicted of the prompt and in the nodes of the tree behind its hit.

    Args:
        tree: of the device, which remembers what was evicted.
        found: the look-up, as current as the tree.
    """
    match, length = found.match, found.length
    if not found.may_hit:
        return Counter({MissReason.NOT_CACHEABLE: length})
    kept = min(match.kv_length, length)
    resumable = max(_lost_state(tree, match, found), match.length)
    evicted = _evicted_kv(tree, match, found)
    # What was evicted behind the KV explains the tokens there, not a state among them.
    lost = min(resumable, kept) if evicted else resumable
    rest = length - max(kept, lost) - evicted
    return +Counter(
        {
            MissReason.STATE_EVICTED: lost - match.length,
            MissReason.NO_SNAPSHOT: max(kept - lost, 0),
            MissReason.KV_EVICTED: evicted,
            _why_unknown(tree, found, is_known=bool(kept or evicted)): rest,
        }
    )


def _why_unknown(tree: MambaRadixCache, found: LookUp, *, is_known: bool) -> MissReason:
    """Why the tree has no tokens of a sequence beyond those that it knows."""
    size = tree.page_size
    if is_known:
        return MissReason.NEW
    if found.length <= size:
        return MissReason.TOO_SHORT
    if tree.begins_elsewhere(found.tokens[:size]):
        return MissReason.OTHER_NAMESPACE
    return MissReason.NEW


def _lost_state(tree: MambaRadixCache, match: Match, found: LookUp) -> int:
    """The last position behind the hit at which a snapshot was evicted.

    Not behind the hit if there is none.
    """
    evicted, node = tree.evicted, match.kv_node
    last = min(match.kv_length, found.limit)
    while node is not None and evicted is not None:
        if node.end <= last:
            below, limit = tree.evicted_below(node), found.limit
            tail = evicted.match_tail(below, found.tokens, node.end, limit)
            if tail or node.has_lost_state or node.end <= match.length:
                return node.end + tail
        node = node.parent
    return 0


def _evicted_kv(tree: MambaRadixCache, match: Match, found: LookUp) -> int:
    """Tokens behind those whose KV is in the tree that were evicted from it."""
    evicted = tree.evicted
    if evicted is None:
        return 0
    node = match.kv_node
    if node is None:
        below = evicted.below_root(found.namespace)
    elif node.end == match.kv_length:
        below = node.evicted
    else:
        return 0
    return evicted.match(below, found.tokens, match.kv_length)
