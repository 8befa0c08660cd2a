"""Plots show the numbers of the records; configurations have distinct colours and markers; SVG and PNG files."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from itertools import combinations
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import rcParams
from matplotlib.colors import to_hex, to_rgb
from swept import DRAFTS, swept

from specbatch.records.verdicts import Speedup
from specbatch.sweeps.report import plot_style, plots
from specbatch.sweeps.report.plot_style import BLUE, GREEN, INK, KNOWN, PURPLE, VERMILLION, marks
from specbatch.sweeps.report.points import speedups_of
from specbatch.sweeps.report.speedup_plot import speedup_plot

NAMES = ("baseline", "v1", "v2")
SIZES = (1, 4)
RECORDS = [swept(name, concurrency, repeat) for concurrency in SIZES for repeat in (1, 2) for name in NAMES]


def draw(records):
    with plot_style.style():
        return {plot.name: plot for plot in plots.draw(records)}


@pytest.fixture(scope="module")
def drawn():
    found = draw(RECORDS)
    with plot_style.style():
        for plot in found.values():
            plot.figure.canvas.draw()  # ticks and layout
    return found


def lines(axes, label):
    return [line for line in axes.get_lines() if line.get_label() == label]


def runs(name, concurrency):
    return [
        one for one in RECORDS if (one.workload["configuration"], one.workload["concurrency"]) == (name, concurrency)
    ]


def test_every_plot_has_units_and_a_caption(drawn):
    assert list(drawn) == ["speedup", "throughput", "ttft", "tpot", "accept_length", "acceptance", "steps", "shares"]
    for plot in drawn.values():
        assert plot.caption.endswith(".")
        assert "(" in plot.figure.axes[-1].get_xlabel() + plot.figure.axes[-1].get_ylabel()
        assert plot.figure.axes[-1].get_xlabel()
        assert plot.figure.axes[-1].get_ylabel()


def test_speedups_have_their_intervals_and_are_hollow_if_undecided(drawn):
    (axes,) = drawn["speedup"].figure.axes
    known = speedups_of(RECORDS)
    points = [line for line in axes.get_lines() if len(line.get_xdata()) == 1 and line.get_markersize() == 8]
    shown = {line.get_ydata()[0]: line for line in points}
    bottom, top = axes.get_ylim()
    bars = {segment[0][0]: (segment[0][1], segment[1][1]) for bar in axes.collections for segment in bar.get_segments()}
    for place, name in enumerate(NAMES[1:]):
        for spot, concurrency in enumerate(SIZES):
            speedup = known[concurrency, name]
            line = shown[speedup.ratio]
            x = line.get_xdata()[0]
            assert x == pytest.approx(spot + (-0.175, 0.175)[place])
            assert bars[x] == (max(speedup.low, bottom), min(speedup.high, top))
            assert (line.get_markerfacecolor() == "none") == (speedup.verdict == "undecided")
    assert len(shown) == len(bars) == 4
    assert {speedup.verdict for speedup in known.values()} > {"undecided"}  # both faces are drawn
    assert drawn["speedup"].figure.legends[0].get_texts()[0].get_text() == "the baseline"


def test_speedup_of_one_repeat_has_no_interval():
    (axes,) = draw([swept("one"), swept("two")])["speedup"].figure.axes
    assert not axes.collections
    assert [line.get_markerfacecolor() for line in axes.get_lines() if len(line.get_xdata()) == 1] == ["none"]


def drawn_speedups(speedups, bases):
    own = {name: {"color": mark.colour, "marker": mark.marker, "label": name} for name, mark in marks(bases).items()}
    with plot_style.style():
        plot = speedup_plot(speedups, own, bases)
        plot.figure.canvas.draw()
    return plot


def test_axis_follows_the_points_and_cut_bars_have_an_arrow():
    """An interval over two repeats can reach to 40 times the ratio."""
    speedups = {
        (1, "v1"): Speedup(1.5, 1.4, 1.6, "pays", 2),
        (1, "v2"): Speedup(1.8, 0.08, 40.0, "undecided", 2),
        (4, "v2"): Speedup(1.2, 0.7, 2.0, "undecided", 2),
    }
    plot = drawn_speedups(speedups, {"baseline": "baseline", "v1": "baseline", "v2": "baseline"})
    (axes,) = plot.figure.axes
    bottom, top = axes.get_ylim()
    assert 0 < bottom < 0.7
    assert 2.0 < top < 2.8
    bars = sorted(tuple(place[1] for place in segment) for bar in axes.collections for segment in bar.get_segments())
    assert bars == [pytest.approx(ends) for ends in ((bottom, top), (0.7, 2.0), (1.4, 1.6))]
    arrows = [(line.get_marker(), *line.get_ydata()) for line in axes.get_lines() if line.get_markersize() == 5]
    assert sorted(arrows) == [("^", top), ("v", bottom)]
    assert "arrow" in plot.caption
    assert "arrow" not in drawn_speedups({(1, "v1"): speedups[1, "v1"]}, {"v1": "baseline"}).caption


def test_many_configurations_have_a_panel_for_each_concurrency():
    names = [f"own {number}" for number in range(9)]
    speedups = {(size, name): Speedup(1.5, None, None, "one repeat", 1) for size in (1, 4) for name in names}
    bases = dict.fromkeys(["baseline", *names], "baseline") | {"own 1": "own 0"}
    plot = drawn_speedups(speedups, bases)
    assert [axes.get_title(loc="left") for axes in plot.figure.axes] == ["concurrency 1", "concurrency 4"]
    assert {axes.get_ylim() for axes in plot.figure.axes} == {plot.figure.axes[0].get_ylim()}
    assert plot.caption.endswith(" own 1 is compared with own 0, the others with baseline.")
    assert "relative to what each configuration is compared with (the line at 1)" in plot.caption


def test_throughput_holds_the_means_over_repeats(drawn):
    (axes,) = drawn["throughput"].figure.axes
    for name in NAMES:
        (line,) = lines(axes, name)
        for concurrency, x, y in zip(SIZES, *line.get_data(), strict=True):
            metrics = [one.metrics for one in runs(name, concurrency)]
            assert x == pytest.approx(np.mean([one["per_user_throughput"] for one in metrics]))
            assert y == pytest.approx(np.mean([one["output_throughput"] for one in metrics]))
    assert {text.get_text() for text in axes.texts} == {"1", "4"}


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=12))
def test_pareto_line_holds_the_undominated_points(points):
    def dominated(one):
        return any(other != one and other[0] >= one[0] and other[1] >= one[1] for other in points)

    assert plots.pareto(points) == sorted({point for point in points if not dominated(point)})


@pytest.mark.parametrize("which", ["ttft", "tpot"])
def test_latency_shows_requests_and_repeats(drawn, which):
    (axes,) = drawn[which].figure.axes
    bars = [collection.get_segments()[0] for collection in axes.collections]
    dots = [line for line in axes.get_lines() if line.get_label().startswith("_")]
    for place, name in enumerate(NAMES):
        (line,) = lines(axes, name)
        for spot, (concurrency, x, middle) in enumerate(zip(SIZES, *line.get_data(), strict=True)):
            each = [[1000 * row[f"{which}_s"] for row in one.requests] for one in runs(name, concurrency)]
            assert middle == pytest.approx(np.median(np.concatenate(each)))
            assert abs(x - spot) < 0.35
            low, high = np.percentile(np.concatenate(each), (10, 90))
            assert any(np.allclose(bar, [(x, low), (x, high)]) for bar in bars), (place, concurrency)
            medians = [np.median(values) for values in each]
            assert any(np.allclose(dot.get_xdata(), x) and np.allclose(dot.get_ydata(), medians) for dot in dots)
    assert [text.get_text() for text in axes.get_xticklabels()] == ["1", "4"]


def test_aborted_requests_are_not_drawn():
    made = swept("v2")
    before = [1000 * row["ttft_s"] for row in made.requests]
    made.requests.append({**made.requests[0], "finish_reason": "abort", "ttft_s": 1e6})
    (line,) = lines(draw([made])["ttft"].figure.axes[0], "v2")
    assert line.get_ydata() == pytest.approx([np.median(before)])


def test_accept_lengths_are_shares_of_the_verifies(drawn):
    for axes, concurrency in zip(drawn["accept_length"].figure.axes, SIZES, strict=True):
        assert axes.get_title(loc="left") == f"concurrency {concurrency}"
        assert not lines(axes, "baseline")
        for name in ("v1", "v2"):
            (line,) = lines(axes, name)
            counts = np.sum([one.counters["emitted_histogram"] for one in runs(name, concurrency)], axis=0)
            assert line.get_ydata() == pytest.approx(100 * counts[1:] / counts.sum())
            assert np.round(line.get_xdata()).tolist() == [1, 2, 3, 4, 5]
            heights = [bar.get_height() for bar in axes.patches if to_hex(bar.get_facecolor()) == line.get_color()]
            assert heights == pytest.approx(line.get_ydata())


def test_acceptance_by_position_of_tried_and_of_all_drafts(drawn):
    for axes, concurrency in zip(drawn["acceptance"].figure.axes, SIZES, strict=True):
        for name in ("v1", "v2"):
            counts = [one.counters["acceptance"] for one in runs(name, concurrency)]
            drafted, tried, accepted = (
                np.sum([one[key] for one in counts], axis=0) for key in ("drafted", "tried", "accepted")
            )
            own = [line for line in axes.get_lines() if line.get_color() == KNOWN[name].colour]
            by_style = {line.get_linestyle(): line.get_ydata() for line in own}
            assert len(drafted) == DRAFTS
            assert by_style["-"] == pytest.approx(100 * accepted / tried)
            assert by_style[":"] == pytest.approx(100 * accepted / drafted)
            assert not np.allclose(by_style["-"], by_style[":"])


def test_drafts_that_were_never_tried_leave_a_gap():
    made = swept("v1")
    made.counters["acceptance"] = {"drafted": [9, 9], "tried": [9, 0], "accepted": [0, 0], "context": []}
    (axes,) = draw([made])["acceptance"].figure.axes
    solid = next(line for line in axes.get_lines() if line.get_linestyle() == "-")
    assert solid.get_ydata()[0] == 0
    assert math.isnan(solid.get_ydata()[1])


def widths(axes, row):
    return [bar.get_width() for bar in axes.patches if round(bar.get_y() + bar.get_height() / 2, 3) == row]


def test_steps_are_split_where_there_are_device_times(drawn):
    (axes,) = drawn["steps"].figure.axes
    assert drawn["steps"].remark == ""
    assert widths(axes, 0) == pytest.approx([9, 3])
    marked = {(line.get_label(), line.get_ydata()[0]) for line in axes.get_lines()}
    assert marked == {(name, row) for start in (0, 4) for row, name in enumerate(NAMES, start)}
    ticks = zip(axes.get_yticks(), (text.get_text() for text in axes.get_yticklabels()), strict=True)
    assert list(ticks) == [(1, "1"), (5, "4")]
    host = draw([swept("baseline"), swept("v1", device=False)])["steps"]
    assert widths(host.figure.axes[0], 1) == pytest.approx([12])
    assert "for want of device clocks" in host.remark
    assert host.remark.endswith("of v1 at 4.")


def test_shares_are_iterations_gaps_and_the_rest(drawn):
    (axes,) = drawn["shares"].figure.axes
    busy, idle = (np.median([100 * one.counters[key] / one.metrics["duration_s"] for one in runs("baseline", 1)])
                  for key in ("device_s", "device_idle_s"))  # fmt: skip
    found = widths(axes, 0)
    assert found == pytest.approx([busy, idle, 100 - busy - idle])


def test_plots_without_data_have_a_remark():
    bare = swept("v1")
    bare.counters, bare.requests = {}, []
    bare.metrics |= dict.fromkeys(("per_user_throughput", "step_time_s", "device_step_s"))
    found = draw([bare]).values()
    assert [plot.figure for plot in found] == [None] * 8
    assert all(plot.remark for plot in found)


def test_missing_points_leave_the_others():
    (axes,) = draw([swept("baseline", 1), swept("baseline", 4), swept("v2", 4)])["throughput"].figure.axes
    assert len(lines(axes, "v2")[0].get_xdata()) == 1
    assert len(lines(axes, "baseline")[0].get_xdata()) == 2


def test_legends_name_every_configuration_and_simulated_acceptance():
    names = ["baseline", "_mine", "$a$ b", "long " * 12]
    found = draw([*map(swept, names), swept("v1", simulate=2.4)]).values()
    expected = [*(name.strip() for name in names), "v1 (simulated)"]
    for plot in found:
        texts = [" ".join(text.get_text().split()) for text in plot.figure.legends[0].get_texts()]
        drafting = plot.name in ("speedup", "accept_length", "acceptance")
        assert [text for text in texts if text in expected] == expected[1 if drafting else 0 :]
        assert "v1" not in texts


# -- how they look ----------------------------------------------------------------------------------------------------


def test_configuration_has_one_colour_and_marker_in_all_plots(drawn):
    for plot in drawn.values():
        for axes in plot.figure.axes:
            for name, mark in marks(NAMES).items():
                for line in lines(axes, name):
                    assert (line.get_color(), line.get_marker()) == (mark.colour, mark.marker)
    bars = drawn["steps"].figure.axes[0].patches
    assert {to_hex(bar.get_facecolor() if bar.get_fill() else bar.get_edgecolor()) for bar in bars} == {
        KNOWN[name].colour for name in NAMES
    }


def test_marks_do_not_depend_on_other_configurations():
    assert marks(["v2"])["v2"] == marks(["x", "v2", "baseline"])["v2"] == KNOWN["v2"]
    assert list(marks(["x", "v2", "x"])) == ["x", "v2"]


def test_many_configurations_have_distinct_marks():
    many = marks([*KNOWN, *(f"own {number}" for number in range(35))])
    assert len(set(many.values())) == len(many) == 39
    assert len({mark.colour for mark in list(many.values())[:5]}) == 5


def test_colour_is_the_algorithm_and_marker_the_schedule_where_several_have_several():
    schedules = ("v1", "v2", "v2+piecewise")
    kinds = {f"{one} {schedule}": (one, schedule) for one in "abcde" for schedule in schedules}
    kinds |= {"baseline": ("", "v2"), "plain": ("", "v2+piecewise")}
    many = marks(kinds, kinds)
    assert len(set(many.values())) == 17
    assert many["baseline"] == KNOWN["baseline"]
    for one in "abcde":
        assert len({many[f"{one} {schedule}"].colour for schedule in schedules}) == 1
        assert [many[f"{one} {schedule}"].marker for schedule in schedules] == [
            KNOWN[name].marker for name in schedules
        ]
    twice, one_each = kinds | {"again": ("a", "v1")}, {"a": ("a", "v2"), "b": ("b", "v2")}
    for names in (twice, one_each, kinds | {"f": ("f", "v1")}):
        assert marks(names, names) == marks(names)


def luminance(colour):
    values = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in to_rgb(colour)]
    return 0.2126 * values[0] + 0.7152 * values[1] + 0.0722 * values[2]


@pytest.mark.parametrize("page", ["#ffffff", "#16181d"])
@pytest.mark.parametrize("colour", [BLUE, VERMILLION, GREEN, PURPLE])
def test_colours_stand_out_on_light_and_dark_pages(colour, page):
    """WCAG 2.1 (1.4.11) requires a contrast of 3 for graphics."""
    low, high = sorted((luminance(colour), luminance(page)))
    assert (high + 0.05) / (low + 0.05) >= 3


# Machado, Oliveira and Fernandes 2009, severity 1: vision without red, green or blue cones.
VISION = {
    "all": np.eye(3),
    "no red": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "no green": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "no blue": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}


def lab(colour, eyes):
    values = np.array(to_rgb(colour))
    linear = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ np.clip(np.array(VISION[eyes]) @ linear, 0, 1) / [0.95047, 1, 1.08883]
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("eyes", VISION)
def test_colours_differ_with_colour_blindness(eyes):
    colours = [INK, "#e6e8ea", BLUE, VERMILLION, GREEN, PURPLE]
    assert min(np.linalg.norm(lab(one, eyes) - lab(other, eyes)) for one, other in combinations(colours, 2)) > 15


# -- files ------------------------------------------------------------------------------------------------------------


def test_svg_takes_the_colour_of_its_page(drawn):
    with plot_style.style():
        text = plot_style.svg(drawn["throughput"].figure, "throughput")
    ElementTree.fromstring(text)
    assert INK not in text.replace(plot_style.DARK, "")
    assert "currentColor" in text
    assert text.count(plot_style.DARK) == 1
    assert ">throughput per user (tok/s)<" in text  # text, not outlines
    ids = re.findall(r'\bid="([^"]*)"', text)
    assert len(ids) == len(set(ids))
    assert all(name.startswith("throughput-") for name in ids)
    used = re.findall(r'(?:href="|url\()#([^")]*)', text)
    assert used
    assert set(used) <= set(ids)
    assert not re.findall(r'(?:href="|url\()(?!#)', text)


def test_inline_svg_has_a_label_and_scales(drawn):
    with plot_style.style():
        text = plot_style.inline(plot_style.svg(drawn["ttft"].figure, "ttft"), 'a <label> of "mine"')
    root = ElementTree.fromstring(text)
    assert root.get("aria-label") == 'a <label> of "mine"'
    assert root.get("width") is None
    assert root.get("viewBox")
    assert text.startswith("<svg")
    assert plot_style.DARK not in text  # the page has its own


def test_files_are_the_same_each_time():
    def files():
        figure = draw(RECORDS[:2])["ttft"].figure
        with plot_style.style():
            return plot_style.svg(figure, "ttft"), plot_style.png(figure)

    assert files() == files()


def test_png_is_on_white_and_sharp(drawn):
    from io import BytesIO

    from PIL import Image

    with plot_style.style():
        image = Image.open(BytesIO(plot_style.png(drawn["tpot"].figure)))
    assert image.width >= 700
    assert image.convert("RGB").getpixel((2, 2)) == (255, 255, 255)


def test_matplotlib_settings_of_the_user_are_restored():
    own = {"font.size": 33, "axes.facecolor": "red"}
    before = {name: rcParams[name] for name in own}
    rcParams.update(own)
    try:
        with plot_style.style():
            assert (rcParams["font.size"], rcParams["axes.facecolor"]) == (11, "white")
        assert {name: rcParams[name] for name in own} == own
    finally:
        rcParams.update(before)


def test_drawing_needs_no_pyplot_and_imports_are_lazy():
    code = (
        "import sys; import specbatch.sweeps.report.report, specbatch.sweeps.report.plots;"
        "assert not [name for name in ('matplotlib', 'pandas', 'torch', 'jinja2') if name in sys.modules];"
        "from swept import swept; from specbatch.sweeps.report import plots, plot_style\n"
        "with plot_style.style(): plots.draw([swept('v1')])\n"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}  # with tests/kit
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
