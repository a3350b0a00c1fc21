"""Pictures of runs: how TTFT is distributed, and what every replica had in flight over time."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from sim.fleet import Run

DPI = 110


def check(path: Path) -> None:
    """Raise before a long run what would make `draw` fail after it: ImportError without matplotlib, ValueError for a
    kind of picture that nobody draws, OSError where there is no directory for it."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'prefix-affinity-router[sim]'") from error
    kinds = Figure().canvas.get_supported_filetypes()
    if path.suffix[1:] not in kinds:
        raise ValueError(f"{path}: a picture ends in one of .{', .'.join(sorted(kinds))}")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent} is no directory")


def draw(runs: Sequence[Run], path: Path) -> None:
    """The share of requests answered within a time, for all runs; below, a panel of in-flight requests for each."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(9, 4 + 1.4 * len(runs)), layout="constrained")
    axes = figure.subplots(1 + len(runs), 1, gridspec_kw={"height_ratios": [3.2] + [1] * len(runs)})
    distribution, panels = axes[0], axes[1:]
    for run in runs:
        ttfts = sorted(visit.ttft_s for visit in run.visits)
        shares = [(rank + 1) / len(ttfts) for rank in range(len(ttfts))]
        distribution.plot(ttfts, shares, label=run.policy, linewidth=1.2)
    distribution.set(xscale="log", xlabel="time to first token, s", ylabel="share of requests", ylim=(0, 1))
    distribution.legend(fontsize="small")
    distribution.grid(alpha=0.3)
    highest = max(max(loads) for run in runs for _, loads in run.samples)
    for run, panel in zip(runs, panels, strict=True):
        times = [at_s for at_s, _ in run.samples]
        for replica in range(len(run.engines)):
            panel.plot(times, [loads[replica] for _, loads in run.samples], linewidth=0.4, alpha=0.6)
        panel.set_ylim(0, max(1, highest))
        panel.set_ylabel("in flight", fontsize="small")
        panel.set_title(f"{run.policy}: each replica", fontsize="small", loc="left")
    if len(panels):
        panels[-1].set_xlabel("s")
    figure.savefig(path, dpi=DPI)
