"""The plot that a report opens with: speedup over the baseline by concurrency, with 95% intervals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specbatch.records.intervals import CONFIDENCE
from specbatch.records.verdicts import LOSES, PAYS, Speedup
from specbatch.sweeps.report.plot_style import INK, Looks, Plot, beside, legend, panels

NAME = "speedup"
TITLE = "Speedup by concurrency"
CAPTION = (
    f"Output tokens per second relative to {{base}} (the line at 1). Bar: {CONFIDENCE:.0%} interval over the repeats. "
    "Filled: the interval excludes 1. Hollow: it does not, or one repeat has none."
)
HEIGHT = 3.0  # inches


def speedup_plot(speedups: Mapping[tuple[Any, ...], Speedup], own: Looks, base: str | None) -> Plot:
    """The plot. speedups: by (concurrency, configuration), relative to `base`."""
    other = "the baseline" if base == "baseline" else str(base)
    caption = CAPTION.format(base=other)
    if not speedups:
        return Plot(NAME, TITLE, caption, None, "There are no two configurations to compare.")
    figure, (axes,) = panels(1, HEIGHT)
    axes.axhline(1, color=INK, linewidth=1, linestyle="--", label=other)
    concurrencies = list(dict.fromkeys(concurrency for concurrency, _ in speedups))
    names = [name for name in own if any(name == which for _, which in speedups)]
    for place, name in enumerate(names):
        look = own[name] | {"label": None}
        axes.plot([], [], linestyle="none", markersize=8, **own[name])  # for the legend
        for spot, concurrency in enumerate(concurrencies):
            if (speedup := speedups.get((concurrency, name))) is None:
                continue
            x = spot + beside(place, len(names))
            if speedup.low is not None and speedup.high is not None:
                axes.vlines(x, speedup.low, speedup.high, color=look["color"], linewidth=3, alpha=0.6)
            decided = speedup.verdict in (PAYS, LOSES)
            face = look["color"] if decided else "none"
            axes.plot(x, speedup.ratio, linestyle="none", markerfacecolor=face, markersize=8, **look)
    axes.set_xlim(-0.5, len(concurrencies) - 0.5)
    axes.margins(y=0.12)
    axes.set_xticks(range(len(concurrencies)), [str(number) for number in concurrencies])
    axes.grid(visible=False, axis="x")
    axes.set_xlabel("concurrency (requests)")
    axes.set_ylabel("speedup (times)")
    legend(figure)
    return Plot(NAME, TITLE, caption, figure)
