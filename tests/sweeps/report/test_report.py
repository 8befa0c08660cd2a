"""`report.html` and the other files of a report: complete, made from records only, readable offline and on phones."""

from __future__ import annotations

import csv
import html
import json
import re
import shutil
import subprocess

import pytest
from crossed import first_quick
from lxml import etree
from lxml import html as parser
from swept import saved, swept

from specbatch.errors import SpecbatchError
from specbatch.files.atomic_file import UnwritableError
from specbatch.sweeps.report.heading import about
from specbatch.sweeps.report.points import load_records
from specbatch.sweeps.report.report import command_of, draw_all, page, warnings_of, write_report
from specbatch.sweeps.report.sentences import headline
from specbatch.sweeps.report.serving import serving_rows
from specbatch.sweeps.report.tables import write_summary

NAMES = ("baseline", "v2+piecewise", "mine draft-tokens=3 draft-topk=10 attention-backend=triton")
RECORDS = [swept(name, concurrency) for concurrency in (1, 4) for name in NAMES]
for one in RECORDS:
    one.config["model"] = "/models/" + "unbreakable" * 9  # a phone's screen is narrower


def files_of(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = saved(tmp_path_factory.mktemp("sweep"), *RECORDS)
    write_report(found)
    return found


@pytest.fixture(scope="module")
def document(folder):
    return parser.fromstring((folder / "report.html").read_text())


def html_of(records):
    return page(records, [], serving_rows(records), "specbatch report x")


def test_report_is_complete_and_reproducible(folder, tmp_path):
    names = set(files_of(folder))
    assert names >= {
        f"{table}.{kind}" for table in ("summary", "concurrency", "serving") for kind in ("md", "csv", "json")
    }
    plots = ("speedup", "throughput", "ttft", "tpot", "accept_length", "acceptance", "steps", "shares")
    assert names >= {f"plots/{name}.{kind}" for name in plots for kind in ("svg", "png")}
    paths = write_report(folder, tmp_path / "deep" / "copy")
    assert paths[-1] == tmp_path / "deep/copy/report.html"
    before, after = files_of(folder), files_of(tmp_path / "deep/copy")
    assert set(after) == {name for name in before if not name.endswith(("record.json", "requests.jsonl"))}
    assert [name for name in after if after[name] != before[name]] == ["report.html"]  # contains its own command
    again = command_of(folder, tmp_path / "deep/copy").encode()
    assert after["report.html"].replace(again, command_of(folder, None).encode()) == before["report.html"]


@pytest.mark.usefixtures("no_plots")
def test_summary_of_an_evaluation_is_kept(tmp_path):
    copy = saved(tmp_path / "eval", swept("baseline"), swept("v1"))
    for path in [copy / "summary.md", *(point / "questions.jsonl" for point in copy.glob("*/c4/r1"))]:
        path.write_text("scores")
    assert write_report(copy)[-1] == copy / "report/report.html"
    assert (copy / "summary.md").read_text() == "scores"


def test_summary_equals_that_of_a_sweep(folder, tmp_path):
    copy = saved(tmp_path / "copy", *RECORDS)
    write_summary(copy)
    assert (copy / "summary.md").read_bytes() == (folder / "summary.md").read_bytes()
    assert (copy / "summary.csv").read_bytes() == (folder / "summary.csv").read_bytes()


@pytest.mark.usefixtures("no_plots")
def test_unmeasured_points_of_the_plan_are_named(tmp_path):
    copy = saved(tmp_path / "cut", swept("baseline"))
    plan = {"configurations": {"baseline": {}, "v2": {}}, "concurrency": [4, 99], "repeats": 1}
    (copy / "sweep.json").write_text(json.dumps(plan))
    write_report(copy)
    missing = "1 of v2 at concurrency 4, 1 of baseline at concurrency 99, 1 of v2 at concurrency 99"
    note = f"UNFINISHED: 3 points without a record ({missing})"
    assert note in (copy / "summary.md").read_text()
    assert any(note in text for text in json.loads((copy / "summary.json").read_text())["notes"])
    assert "at concurrency 99" in parser.fromstring((copy / "report.html").read_text()).text_content()


@pytest.mark.parametrize("plan", ["[]", "{", '{"configurations": {}}', '{"configurations": 3}'])
def test_unreadable_plan_is_refused(tmp_path, plan):
    copy = saved(tmp_path / "torn", *RECORDS)
    (copy / "sweep.json").write_text(plan)
    with pytest.raises(SpecbatchError, match=r"^folder='.*torn/sweep.json': .*; move it away or run the sweep"):
        write_report(copy)


def test_csv_and_json_agree(folder):
    for name in ("concurrency", "serving"):
        rows = list(csv.DictReader((folder / f"{name}.csv").open()))
        plain = json.loads((folder / f"{name}.json").read_text())
        assert [{key: "" if value is None else str(value) for key, value in row.items()} for row in plain] == rows
    summary = json.loads((folder / "summary.json").read_text())
    rows = list(csv.DictReader((folder / "summary.csv").open()))
    assert len(summary["rows"]) == len(rows) == 6
    assert summary["rows"][1]["output_throughput"] == pytest.approx(float(rows[1]["output_throughput"]))
    assert summary["rows"][0]["accept_rate"] is None
    assert summary["about"]["model"]
    assert "NaN" not in (folder / "summary.json").read_text()


def test_page_describes_the_run(document):
    text = document.text_content()
    for name, value in about(RECORDS).items():
        assert name in text
        assert value in text
    assert "6, made from 2026-01-02T03:04:05+00:00" in text


def test_page_has_every_table_plot_and_block(document):
    captions = [caption.text for caption in document.iter("caption")]
    assert captions == ["Means over repeats", "All columns", "Acceptance, greedy", *NAMES]
    assert [len(list(figure.iter("{*}svg", "svg"))) for figure in document.iter("figure")] == [1] * 8
    assert [summary.text for summary in document.iter("summary")][:7] == [
        "All columns",
        *(f"{name} at concurrency {concurrency}" for concurrency in (1, 4) for name in NAMES),
    ]
    assert sum("Serving Benchmark Result" in (pre.text or "") for pre in document.iter("pre")) == 6
    assert "accept length: Tokens emitted per verify" in document.text_content()


def test_rows_have_a_cell_per_title(document):
    for table in document.iter("table"):
        titles = len(table.findall("thead/tr/th"))
        assert titles > 4
        assert {len(row) for row in table.findall("tbody/tr")} == {titles}


def test_page_loads_nothing(folder):
    text = (folder / "report.html").read_text()
    tree = parser.fromstring(text)
    assert not list(tree.iter("script", "link", "img", "iframe", "object", "embed"))
    assert not re.findall(r"@import|url\((?!#)", text)
    hrefs = [value for node in tree.iter() for key, value in node.attrib.items() if key.endswith(("href", "src"))]
    assert hrefs
    assert all(value.startswith("#") for value in hrefs)


def test_ids_are_unique_and_html_is_valid(folder):
    text = (folder / "report.html").read_text()
    errors = etree.HTMLParser(recover=True)
    etree.fromstring(text.encode(), errors)
    unknown = ("Tag",)  # libxml2 knows no HTML5: figure, main, svg ...
    assert [str(error) for error in errors.error_log if not error.message.startswith(unknown)] == []
    ids = [node.get("id") for node in parser.fromstring(text).iter() if node.get("id")]
    assert len(ids) == len(set(ids))
    assert text.count("<svg") == text.count("</svg>") == 8


def test_page_has_a_table_by_category():
    made = swept("v1")
    for row in made.requests:
        row |= {"category": "coding" if row["index"] % 2 else "math", "turn": 1}
    tree = parser.fromstring(html_of([made]))
    (found,) = (node for node in tree.iter("table") if node.findtext("caption") == "By category")
    assert {row.findtext("td[1]") for row in found.iter("tr")} - {None} == {"coding", "math"}
    assert "By turn" in [node.findtext("caption") for node in tree.iter("table")]


def test_page_opens_with_the_result_and_its_plot(document):
    first = document.find(".//section")
    assert first.findtext("p[@class='result']") == headline(RECORDS)
    assert [figure.get("id") for figure in first.iter("figure")] == ["speedup"]
    assert not first.findall(".//a")  # no warnings to point to


def test_decision_is_next_to_the_configuration(document):
    (titles,) = (
        [title.text_content() for title in table.iterfind("thead/tr/th")]
        for table in document.iter("table")
        if table.findtext("caption") == "Means over repeats"
    )
    assert titles[:3] == ["configuration, concurrency", "speedup over baseline (95% interval)", "verdict"]


def test_page_shows_how_it_was_made():
    records = [swept("baseline"), swept("v1")]
    for record in records:
        record.provenance = {
            "command": ["specbatch", "sweep", "--model", "my model"],
            "git": {"revision": "abc", "dirty": True},
            "environment": {"OMP_NUM_THREADS": "1", "NCCL_DEBUG": "INFO"},
        }
        record.hardware |= {"gpu": "NVIDIA H200", "driver": "580.1", "cuda": "13.0", "cpu": "abacus"}
    last = parser.fromstring(html_of(records)).findall(".//section")[-1]
    assert [pre.text for pre in last.iter("pre")] == ["specbatch sweep --model 'my model'", "specbatch report x"]
    lines = dict(
        zip((name.text for name in last.iter("dt")), (text.text_content() for text in last.iter("dd")), strict=True)
    )
    assert lines.items() >= {
        "git revision": "abc-dirty", "GPU": "NVIDIA H200", "driver": "580.1", "CUDA": "13.0",
        "environment": "NCCL_DEBUG=INFO OMP_NUM_THREADS=1",
    }.items()  # fmt: skip
    assert lines["CPU"].startswith("abacus, ")
    for record in records:
        record.provenance = {}
    last = parser.fromstring(html_of(records)).findall(".//section")[-1]
    assert [pre.text for pre in last.iter("pre")] == ["specbatch report x"]
    assert "do not have the command" in last.text_content()
    assert "git revision" not in last.text_content()


def test_page_says_which_configurations_are_compared():
    records = [swept(name) for name in ("baseline", "v1", "v2+piecewise", "plain")]
    assert "compared with" not in html_of(records)
    for one in records[2:]:
        one.config["graphs"]["prefill"] = "piecewise"
    records[3].config["speculation"] = records[0].config["speculation"]
    text = parser.fromstring(html_of(records)).text_content()
    assert "v2+piecewise is compared with plain, the others with baseline." in text
    assert "speedup (95% interval)" in text


def test_warnings_follow_the_result():
    records = [swept("baseline"), swept("v1", simulate=2.4), swept("v2", output_sha256="other")]
    records[0].config["graphs"]["decode"] = "whole"
    records[2].metrics["requests"] = 3
    tree = parser.fromstring(html_of(records))
    sections = list(tree.iter("section"))
    assert sections[1].get("class") == "warnings"
    kinds = [node.text for node in sections[1].iter("strong")]
    assert kinds == ["SIMULATED", "NO REPLAYS", "INCOMPLETE", "TOKENS DIFFER"]
    assert (
        sections[0].findtext(".//a[@href='#warnings']") == "Warnings: SIMULATED, NO REPLAYS, INCOMPLETE, TOKENS DIFFER"
    )
    text = sections[1].text_content()
    assert "v1: acceptance was drawn at random (geometric, mean 2.4)" in text
    assert "v2 at concurrency 4, repeat 1: 3 of 8 prompts finished." in text
    notes = sections[-2].text_content()
    assert not any(kind in notes for kind in kinds)
    assert "Means over repeats" in notes


def test_no_box_without_warnings(document):
    assert warnings_of(RECORDS) == {}
    assert "warnings" not in {section.get("class") for section in document.iter("section")}


def test_many_warnings_of_a_kind_are_collapsed():
    records = [swept("v1", concurrency, repeat, prompts=99) for concurrency in (1, 2) for repeat in (1, 2)]
    (many,) = parser.fromstring(html_of(records)).get_element_by_id("warnings").iter("details")
    assert many.get("open") is None
    assert many.find("summary").text_content() == "INCOMPLETE (4)"
    (few,) = parser.fromstring(html_of(records[:3])).get_element_by_id("warnings").iter("details")
    assert few.get("open") is not None


@pytest.mark.parametrize(("right", "warns"), [(39, True), (40, False)])
def test_rarely_accepted_first_drafts_warn(right, warns):
    made = swept("v1")
    made.counters["acceptance"] = {"drafted": [200], "tried": [200], "accepted": [right], "context": []}
    assert warnings_of([made]) == (
        {"LOW ACCEPTANCE": ["v1 at concurrency 4: of 200 first drafts 19.5% were accepted."]} if warns else {}
    )


def test_points_below_break_even_warn():
    records = [swept("baseline"), swept("v1")]
    records[1].counters["steps_by_rows"]["4"] = [40, 4.8]
    low = warnings_of(records)["LOW ACCEPTANCE"]
    assert low[0].startswith("below break-even: v1 at concurrency 4 (accept length")
    assert "\n" not in low[0]


def test_names_are_escaped_and_missing_plots_have_a_reason():
    nasty = '<script>alert("x")</script> & co'
    made = swept(nasty)
    made.config["model"] = nasty
    del made.counters["acceptance"]
    drawn = draw_all([made])
    assert [item.plot.name for item in drawn if not item.svg] == ["speedup", "accept_length", "acceptance"]
    text = page([made], drawn, serving_rows([made]), f"specbatch report '{nasty}'")
    assert "<script" not in text
    assert html.escape(nasty, quote=False) in text.replace("&#34;", '"')
    (figure,) = (node for node in parser.fromstring(text).iter("figure") if node.get("id") == "acceptance")
    assert "Not drawn. The records count no drafts" in figure.text_content()


def test_command_is_quoted_for_a_shell(tmp_path):
    assert command_of(tmp_path / "my sweep", None) == f"specbatch report '{tmp_path}/my sweep'"
    assert command_of(tmp_path / "a", tmp_path / "b c").endswith(f"/a --output '{tmp_path}/b c'")


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", '{"config": {}', "[]", '{"no": "record"}', "\xff"], ids=repr)
def test_damaged_records_are_refused(tmp_path, text):
    saved(tmp_path, swept("v1"), swept("v2"))
    (tmp_path / "v2/c4/r1/record.json").write_text(text, encoding="latin-1")
    with pytest.raises(SpecbatchError, match=r"v2/c4/r1/record\.json': .*; move it away or run it again$"):
        load_records(tmp_path)


def test_folder_of_a_sweep_over_several_models_is_refused(tmp_path):
    for model in ("small", "large"):
        saved(tmp_path / model, swept("v1"))
    with pytest.raises(SpecbatchError, match="holds several sweeps; name the folder of one: large, small"):
        load_records(tmp_path)


def test_unwritable_output_is_refused(folder, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UnwritableError, match="cannot be written"):
        write_report(folder, tmp_path / "file")


# -- in a browser -----------------------------------------------------------------------------------------------------

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
# An iframe has its own viewport, as wide as the frame.
PROBE = """<!DOCTYPE html><body><iframe width="{width}" height="700" style="border:0" srcdoc="{page}"></iframe><script>
onload = () => {{
  const w = document.querySelector("iframe").contentWindow, d = w.document, wide = e => e.scrollWidth > e.clientWidth;
  const scale = m => Math.hypot(m.a, m.b);
  const size = t => parseFloat(w.getComputedStyle(t).fontSize) * scale(t.getScreenCTM());
  d.querySelectorAll("details").forEach(e => e.open = true);
  document.title = JSON.stringify({{
    width: w.innerWidth, page: d.documentElement.scrollWidth,
    out: [...d.querySelectorAll("body *")].filter(e => !e.closest(".scroll, svg")
      && e.getBoundingClientRect().right > w.innerWidth + 1).map(e => e.outerHTML.slice(0, 80)),
    tables: d.querySelectorAll("table").length,
    decision: d.querySelector(".scroll th:nth-child(3)").getBoundingClientRect().right,
    scrolled: [...d.querySelectorAll(".scroll")].filter(e => e.querySelector("table") && wide(e)).length,
    blocks: [...d.querySelectorAll("details .scroll")].filter(e => !e.querySelector("table") && wide(e)).length,
    cut: [...d.querySelectorAll("svg text")].filter(t => {{
      const a = t.getBoundingClientRect(), b = t.ownerSVGElement.getBoundingClientRect();
      return a.left < b.left - 2 || a.right > b.right + 2; }}).map(t => t.textContent),
    names: Math.max(...[...d.querySelectorAll("tbody th")].map(e => e.clientWidth)),
    text: Math.min(...[...d.querySelectorAll("svg text")].map(size)),
    columns: new Set([...d.querySelectorAll("figure")].map(e => Math.round(e.getBoundingClientRect().left))).size,
  }});
}};
</script>"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
@pytest.mark.parametrize(("width", "columns"), first_quick(1, [(360, 1), (1200, 3)]))
def test_nothing_overflows_in_a_browser(folder, tmp_path, width, columns):
    text = html.escape((folder / "report.html").read_text())
    (tmp_path / "probe.html").write_text(PROBE.format(width=width, page=text))
    options = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --hide-scrollbars"
    command = [str(BROWSER), *options.split(), f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1300,800"]
    command += ["--dump-dom", (tmp_path / "probe.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    seen = json.loads(html.unescape(re.search(r"<title>(.*?)</title>", done.stdout)[1]))
    assert seen["width"] == seen["page"] == width
    assert seen["out"] == seen["cut"] == []
    assert seen["tables"] == 6
    assert seen["scrolled"] >= (5 if width == 360 else 1)
    assert seen["decision"] < width - 12  # speedup and verdict show without scrolling
    assert seen["blocks"] == (2 if width == 360 else 0)  # only blocks of a long name need scrolling
    assert seen["names"] < 0.45 * width  # the fixed column leaves room for the others
    assert seen["text"] >= 9
    assert seen["columns"] == columns


@pytest.mark.usefixtures("no_plots")
def test_files_that_no_report_has_written_are_not_replaced(tmp_path):
    folder = saved(tmp_path / "sweep", *RECORDS)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/summary.md").write_text("mine")
    with pytest.raises(SpecbatchError, match=r"output='.*mine': has summary\.md, which no report has written"):
        write_report(folder, tmp_path / "mine")
    assert files_of(tmp_path / "mine") == {"summary.md": b"mine"}
    write_report(folder)
    (folder / "report.html").unlink()
    write_report(folder, folder)  # over the report of before


def test_a_sweep_of_which_every_point_failed_has_a_report(tmp_path):
    records = [swept(name, 1, error="out of memory") for name in ("baseline", "v1")]
    for record in records:
        record.metrics, record.counters, record.requests = {}, {}, []
    page = write_report(saved(tmp_path, *records))[-1].read_text()
    assert "out of memory" in page
