# SPDX-License-Identifier: Apache-2.0
"""What a simulation found out, as numbers, as text and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields

from hybrid_plugin.sizes import gib
from hybrid_plugin.tools.simulate.compared import Compared, as_lines
from hybrid_plugin.tools.simulate.drafting import Drafted
from hybrid_plugin.tools.simulate.host_totals import HostTotals
from hybrid_plugin.tools.simulate.latency import Times
from hybrid_plugin.tools.simulate.request import Request


@dataclass(slots=True)
class Series:
    """How things went over time, one value per sample."""

    requests: list[int] = field(default_factory=list)
    """Requests served when the sample was taken."""
    hit_rate: list[float] = field(default_factory=list)
    """Of the requests since the sample before."""
    memory: list[int] = field(default_factory=list)
    """Bytes in use or cached; pages where no size is known."""
    snapshots: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Outcome:
    """Totals of one simulation."""

    policy: str
    requests: int = 0
    """All requests of the trace."""
    measured_requests: int = 0
    """Those that the token counts are of."""
    queried_tokens: int = 0
    """Tokens of their prompts."""
    hit_tokens: int = 0
    """Of those, tokens that were restored."""
    too_long: int = 0
    """Requests, of all, that did not fit even alone."""
    waited: int = 0
    """Sequences, of all, that had to wait until others had ended or gone on, for memory
    or for one of the places of `max_running`."""
    preemptions: int = 0
    """Times that a running sequence made way for another one, and was served again."""
    prefill_steps: int = 0
    """Forward passes of all prefills, pauses for snapshots included."""
    page_evictions: int = 0
    snapshot_evictions: int = 0
    snapshots_taken: int = 0
    peak_pages: int = 0
    peak_snapshots: int = 0
    peak_memory_bytes: int | None = None
    """Of pages and slots in use or cached; None where no size is known."""
    capacity: dict[str, int] = field(default_factory=dict)
    """Pages and slots there are, and tokens in a page."""
    memory_moves: int | None = None
    """Granules that got memory or lost it; None where pools are not elastic."""
    drafts: Drafted | None = None
    """What became of drafts; None without speculation."""
    host: HostTotals | None = None
    """What host memory did; None without any."""
    bound_hit_tokens: int | None = None
    """What no policy can exceed, knowing the whole trace."""
    costs: str = ""
    """What the virtual time is that of."""
    fitted: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Times that costs were fitted to: measured, and simulated with them; seconds."""
    times: Times | None = None
    """In virtual time; None if nothing was measured."""
    order: list[Request] = field(default_factory=list)
    """All requests that were served, in the order of their starts."""
    compared: list[Compared] = field(default_factory=list)
    """Models of the engines' own caches on the same requests."""
    seconds: float = 0.0
    """That the simulation took."""
    series: Series = field(default_factory=Series)

    @property
    def hit_rate(self) -> float:
        """Share of the measured tokens that were restored."""
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0

    @property
    def recomputed_tokens(self) -> int:
        """Measured prompt tokens that were computed, not restored."""
        return self.queried_tokens - self.hit_tokens

    @property
    def evictions(self) -> int:
        """Pages and snapshots that made room for others."""
        return self.page_evictions + self.snapshot_evictions

    @property
    def gap(self) -> float | None:
        """Share of the bound's hit tokens that the policy missed."""
        if not self.bound_hit_tokens:
            return None
        return 1 - self.hit_tokens / self.bound_hit_tokens

    def as_dict(self) -> dict[str, object]:
        """Everything but the series and the requests, for JSON."""
        values: dict[str, object] = {
            one.name: getattr(self, one.name)
            for one in fields(self)
            if one.name not in ("series", "order")
        }
        values["compared"] = [asdict(one) for one in self.compared]
        values["drafts"] = None if self.drafts is None else asdict(self.drafts)
        values["host"] = None if self.host is None else asdict(self.host)
        values["times"] = None if self.times is None else asdict(self.times)
        return {
            "hit_rate": self.hit_rate,
            "hit_tokens": self.hit_tokens,
            "queried_tokens": self.queried_tokens,
            "recomputed_tokens": self.recomputed_tokens,
            "evictions": self.evictions,
            "gap": self.gap,
            **values,
        }

    def as_text(self) -> str:
        """For people."""
        lines = [
            f"policy             {self.policy}",
            f"requests           {self.requests:,}, {self.measured_requests:,} of them "
            "measured",
            f"hit rate           {100 * self.hit_rate:.1f} % of tokens",
            f"hit tokens         {self.hit_tokens:,} of {self.queried_tokens:,}",
            f"recomputed tokens  {self.recomputed_tokens:,}",
            f"evictions          {self.page_evictions:,} pages, "
            f"{self.snapshot_evictions:,} snapshots",
            f"snapshots taken    {self.snapshots_taken:,}",
            f"prefill steps      {self.prefill_steps:,}",
            f"had to wait        {self.waited:,} sequences; {self.preemptions:,} "
            "preemptions",
            f"peak               {self.peak_pages:,} pages, {self.peak_snapshots:,} "
            "snapshots"
            + (
                f", {gib(self.peak_memory_bytes)}"
                if self.peak_memory_bytes is not None
                else ""
            ),
        ]
        if self.memory_moves is not None:
            lines.append(f"elastic pools      {self.memory_moves:,} granules moved")
        if self.host is not None:
            lines += self.host.as_lines()
        if self.drafts is not None:
            lines += self.drafts.as_lines()
        if self.too_long:
            lines.append(f"too long           {self.too_long:,} requests never fitted")
        if self.bound_hit_tokens is not None and self.gap is not None:
            lines.append(
                f"upper bound        {self.bound_hit_tokens:,} hit tokens; "
                f"{100 * self.gap:.1f} % of them were missed"
            )
        if self.times is not None:
            lines += self.times.as_lines(self.measured_requests)
            lines.append(f"costs              {self.costs}")
        for name, (measured, simulated) in self.fitted.items():
            lines.append(
                f"{name:<19}{measured:.3f} s measured, {simulated:.3f} s simulated"
            )
        if self.compared:
            own = Compared(
                "the plugin",
                self.hit_rate,
                self.too_long,
                self.preemptions,
                self.times,
            )
            lines += ["", *as_lines([own, *self.compared]), ""]
        lines.append(f"simulated in       {self.seconds:.1f} s")
        return "\n".join(lines)
