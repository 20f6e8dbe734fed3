# SPDX-License-Identifier: Apache-2.0
"""What can go wrong with a bundle, as values: each is a miss, none is an exception."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Reason(StrEnum):
    """Why a bundle was not stored, or not loaded."""

    MISSING = "the file is gone"
    IO = "the file system failed"
    TORN = "the file is shorter or longer than its header says"
    MALFORMED = "the header is not one of this format"
    VERSION = "the format has another version"
    CORRUPT = "a checksum does not match"
    REPLACED = "another bundle is in its place"
    OTHER_TOKENS = "it holds other tokens"
    LAYOUT = "its layout cannot be converted"
    NO_PARENT = "the bundle before it is not stored"
    NO_ROOM = "it is larger than what the folder may hold"
    DISK_FULL = "the disk is full"
    CLEARED = "the tier was flushed meanwhile"
    BUSY = "the queue is full"
    CLOSED = "the tier is closed"
    INTERNAL = "the tier has a fault"
    PEER_GONE = "the peer does not answer"
    PEER_SECRET = "the peer has another secret"
    PEER_VERSION = "the peer speaks another version"
    PEER_RANKS = "the peer has another number of ranks"
    PEER_MODEL = "the peer serves another model"
    PEER_MALFORMED = "the peer said what makes no sense"
    LEASE_OVER = "the peer's lease is over"
    UNREAD = "nobody read it in time"
    DECLINED = "the peer had no use for it"


@dataclass(frozen=True, slots=True)
class Failure:
    """A bundle that was not stored, or not loaded."""

    reason: Reason
    detail: str = ""
    """What it was, for the log."""

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}" if self.detail else str(self.reason)
