# SPDX-License-Identifier: Apache-2.0
"""A simulation as a picture: hit rate, memory and snapshots over the requests."""

from __future__ import annotations

from pathlib import Path

from hybrid_plugin.config import ConfigError
from hybrid_plugin.tools.simulate.outcome import Outcome


def check_plot(path: Path) -> None:
    """Refuse a picture that could not be written, before the work is done.

    Raises:
        ConfigError: if matplotlib or the folder is missing, or it is no PNG.
    """
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(
            "--plot needs matplotlib: pip install it, or hybrid-plugin with [simulate]."
        ) from error
    if path.suffix != ".png":
        raise ConfigError(f"--plot writes a PNG file, and {path} does not end in .png.")
    if not path.parent.is_dir() or path.is_dir():
        raise ConfigError(f"--plot cannot write {path}; name a file in a folder.")


def write_plot(outcome: Outcome, path: Path) -> None:
    """Draw `outcome` into a PNG file.

    Raises:
        ConfigError: if it cannot be written.
    """
    from matplotlib.figure import Figure

    series = outcome.series
    figure = Figure(figsize=(8, 7), layout="constrained")
    rate, memory, snapshots = figure.subplots(3, 1, sharex=True)
    rate.plot(series.requests, [100 * share for share in series.hit_rate])
    rate.set_ylabel("hit rate, % of tokens")
    rate.set_ylim(0, 100)
    known = outcome.peak_memory_bytes is not None
    scale, unit = (2**30, "GiB") if known else (1, "pages")
    memory.plot(series.requests, [held / scale for held in series.memory])
    memory.set_ylabel(f"in use or cached, {unit}")
    memory.set_ylim(bottom=0)
    snapshots.plot(series.requests, series.snapshots)
    snapshots.set_ylabel("snapshots")
    snapshots.set_ylim(bottom=0)
    snapshots.set_xlabel("requests")
    figure.suptitle(f"{outcome.policy}: {100 * outcome.hit_rate:.1f} % hit rate")
    try:
        figure.savefig(path, dpi=120, format="png")
    except OSError as error:
        raise ConfigError(f"Cannot write {path}: {error.strerror}.") from error
