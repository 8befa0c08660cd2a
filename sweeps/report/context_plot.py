"""The plot of sweeps over several lengths of prompts: accept length and speedup by context, with 95% intervals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specbatch.records.run_record import RunRecord
from specbatch.records.verdicts import LOSES, PAYS
from specbatch.sweeps.report.acceptance import AcceptChange
from specbatch.sweeps.report.plot_style import INK, Looks, legend, panels, style, svg
from specbatch.sweeps.report.plots import looks
from specbatch.sweeps.report.points import points_of, speedups_of
from specbatch.sweeps.report.speedup_plot import limits

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME = "context"
_HEIGHT = 2.1  # inches of a panel
_SPREAD = 1.03  # between the bars of two configurations at one length


def context_plot(
    records: dict[int, list[RunRecord]], lengths: dict[tuple[int, str], AcceptChange], *, brief: bool = False
) -> str:
    """SVG with a panel for the accept length and one for the speedup at each concurrency; brief: at the smallest one.

    records  by the length of the prompts in tokens
    lengths  accept length by length of the prompts and configuration
    """
    with style():
        points = {place: found for own in records.values() for place, found in points_of(own).items()}
        own = looks(points)
        speedups = {size: speedups_of(found) for size, found in records.items()}
        concurrencies = sorted({concurrency for found in speedups.values() for concurrency, _ in found})
        concurrencies = concurrencies[:1] if brief else concurrencies
        figure, every = panels(1 + len(concurrencies), _HEIGHT)
        bars = {name: {size: (one.after, one.interval.low, one.interval.high, True)
                       for (size, which), one in lengths.items() if which == name} for name in own}  # fmt: skip
        _panel(every[0], bars, own, "accept length", "tokens")
        for axes, concurrency in zip(every[1:], concurrencies, strict=True):
            axes.axhline(1, color=INK, linewidth=1, linestyle="--")
            ratios: dict[str, dict[int, Any]] = {name: {} for name in own}
            for size, found in speedups.items():
                for (at, name), one in found.items():
                    if at == concurrency:
                        ratios[name][size] = (one.ratio, one.low, one.high, one.verdict in (PAYS, LOSES))
            axes.set_ylim(
                *limits([one for found in speedups.values() for (at, _), one in found.items() if at == concurrency])
            )
            title = f"speedup at {concurrency} request{'s' if concurrency > 1 else ''}"
            _panel(axes, ratios, {name: look | {"label": None} for name, look in own.items()}, title, "times")
        for axes in every:
            axes.set_xscale("log", base=2)
            axes.set_xticks([*records], [_short(size) for size in records])
            axes.minorticks_off()
        every[-1].set_xlabel("input tokens")
        legend(figure)
        return svg(figure, f"{NAME}-brief" if brief else NAME)


def _panel(axes: Axes, values: dict[str, dict[int, Any]], own: Looks, title: str, unit: str) -> None:
    """A line for each configuration. Filled markers: an effect was shown; hollow ones: it was not."""
    drawn = [name for name, found in values.items() if found]
    for place, name in enumerate(drawn):
        shift = _SPREAD ** (place - (len(drawn) - 1) / 2)
        look = own[name]
        sizes = sorted(values[name])
        axes.plot([size * shift for size in sizes], [values[name][size][0] for size in sizes], linewidth=1.2, **look)
        for size in sizes:
            middle, low, high, shown = values[name][size]
            if low is not None and high is not None:
                axes.vlines(size * shift, low, high, color=look["color"], linewidth=2, alpha=0.5)
            if not shown:
                axes.plot(size * shift, middle, markerfacecolor="white", **look | {"label": None})
    axes.set_title(title, loc="left")
    axes.set_ylabel(unit)


def _short(size: int) -> str:
    return f"{size / 1024:.3g}k" if size >= 1024 else str(size)
