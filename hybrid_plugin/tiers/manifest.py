# SPDX-License-Identifier: Apache-2.0
"""Manifest: what is in a bundle, and all that is needed to judge it unread."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hybrid_plugin.tiers.keys import BundleName
from hybrid_plugin.tiers.row_layout import RowLayout, integer, text

STATE, TOKENS = "state", "tokens"
"""Tensors of every bundle that has them; the others are named after their pools."""

MAX_TOKENS = 1 << 40
"""Far beyond any sequence: keeps sizes that are computed from a header small."""


@dataclass(frozen=True, slots=True)
class Run:
    """The KV that one pool of pages has in a bundle."""

    pool: str
    start: int
    """The first token that counts; its whole page is there."""
    layout: RowLayout

    def rows(self, end: int) -> int:
        """Pages, if the bundle ends at `end`."""
        size = self.layout.tokens
        return -(-end // size) - self.start // size


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A tensor of the file."""

    name: str
    dtype: str
    """By safetensors' names."""
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * (8 if self.dtype == "I64" else 1)


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a bundle holds: KV of tokens `start` to `end`, and the state at `end`.

    Raises:
        ValueError: for numbers that contradict each other.
    """

    key: str
    """Of all tokens up to `end`; `keys.KeyChain.key`."""
    parent: str
    """Key of the bundle that ends at `start`; empty at the start of a sequence."""
    anchor: str
    """Key of the whole chunks of tokens before `end`."""
    fingerprint: str
    rank: str
    """Whose part it is; `Identity.rank_name`."""
    start: int
    end: int
    runs: tuple[Run, ...]
    """One for each pool of pages; those of windows reach back beyond `start`."""
    state: RowLayout | None
    """None for models without states."""
    checksums: tuple[str, ...]
    """XXH3 with 128 bits of each tensor, in the order of `tensors`."""

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end <= MAX_TOKENS:
            raise ValueError(f"tokens {self.start} to {self.end}")
        if bool(self.parent) != (self.start > 0):
            raise ValueError("a bundle has a parent if it does not start at 0")
        for digest in (self.key, self.anchor, self.fingerprint, self.parent or _NONE):
            if not _DIGEST.fullmatch(digest):
                raise ValueError(f"{digest!r:.80} is no SHA-256")
        if not _RANK.fullmatch(self.rank):
            raise ValueError(f"{self.rank!r:.80} is no rank")
        if any(not _CHECKSUM.fullmatch(checksum) for checksum in self.checksums):
            raise ValueError("a checksum is none")
        names = [run.pool for run in self.runs]
        if len({*names, STATE, TOKENS}) < len(names) + 2:
            raise ValueError(f"pools named {names}")
        for run in self.runs:
            if not 0 <= run.start <= self.end or not run.layout.tokens:
                raise ValueError(f"pool {run.pool} from token {run.start}")
        if self.state is not None and self.state.tokens:
            raise ValueError("a state has no tokens")
        if len(self.checksums) != len(list(self.tensors())):
            raise ValueError(f"{len(self.checksums)} checksums")

    def tensors(self) -> Iterator[TensorPlace]:
        """All tensors in the order in which they lie: pages first, where data begins
        at a multiple of 4096 bytes."""
        for run in self.runs:
            shape = (run.rows(self.end), run.layout.row_bytes)
            yield TensorPlace(run.pool, "U8", shape)
        if self.state is not None:
            yield TensorPlace(STATE, "U8", (self.state.row_bytes,))
        yield TensorPlace(TOKENS, "I64", (self.end - self.start,))

    @property
    def name(self) -> BundleName:
        """What it is called."""
        return BundleName(self.key, self.parent, self.anchor, self.fingerprint)

    @property
    def data_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.size for tensor in self.tensors())

    def as_texts(self) -> dict[str, str]:
        """JSON by name, in the one form that a file may have.

        Layouts are apart: thousands of files have the same, which is read once.
        """
        fields: dict[str, object] = {name: getattr(self, name) for name in _PLAIN}
        fields["runs"] = [[run.pool, run.start] for run in self.runs]
        fields["checksums"] = list(self.checksums)
        texts = {"manifest": json.dumps(fields, separators=(",", ":"))}
        for run in self.runs:
            texts[_LAYOUT + run.pool] = run.layout.text
        if self.state is not None:
            texts[_LAYOUT + STATE] = self.state.text
        return texts

    @classmethod
    def from_texts(cls, texts: Mapping[str, str]) -> Manifest:
        """Read what `as_texts` made; other texts may be there.

        Raises:
            ValueError: for anything else.
        """
        try:
            value = json.loads(text(texts["manifest"]))
            state = texts.get(_LAYOUT + STATE)
            return cls(
                key=text(value["key"]),
                parent=text(value["parent"]),
                anchor=text(value["anchor"]),
                fingerprint=text(value["fingerprint"]),
                rank=text(value["rank"]),
                start=integer(value["start"]),
                end=integer(value["end"]),
                runs=tuple(_run(pool, start, texts) for pool, start in value["runs"]),
                state=None if state is None else RowLayout.from_text(text(state)),
                checksums=tuple(text(checksum) for checksum in value["checksums"]),
            )
        except (KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"no manifest: {error!r}") from None


def is_digest(digest: str) -> bool:
    """Whether a text is a SHA-256, as keys and fingerprints are."""
    return _DIGEST.fullmatch(digest) is not None


def _run(pool: Any, start: Any, texts: Mapping[str, str]) -> Run:
    layout = RowLayout.from_text(text(texts[_LAYOUT + text(pool)]))
    return Run(text(pool), integer(start), layout)


_LAYOUT = "layout."
_PLAIN = ("key", "parent", "anchor", "fingerprint", "rank", "start", "end")
_DIGEST = re.compile("[0-9a-f]{64}")
_RANK = re.compile("rank-[0-9]{1,9}-of-[0-9]{1,9}")
_CHECKSUM = re.compile("[0-9a-f]{32}")
_NONE = "0" * 64
