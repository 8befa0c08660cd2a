"""CSV files of other engines' figures: valid and refused contents."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from specbatch.errors import SpecbatchError
from specbatch.sweeps.bench.peers import read_peers
from specbatch.sweeps.bench.sections import KINDS

HEAD = "model,dtype,gpu,section,size,column,peer,value\n"
DRAFTING = "algorithm,draft_steps,draft_topk,draft_tokens,accept_length," + HEAD
ROW = "toy,float32,,decode,3,step_s,Theirs,7.25\n"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\x00\xff\xfe binary", "is not UTF-8 text"),
        (b"", "needs the columns model, dtype"),
        (b"a,b\n1,2\n", "needs the columns model, dtype"),
        ((HEAD + ROW + "toy,float32,,decode\n").encode(), "line 3: 4 cells under 8 columns"),
        ((HEAD + ROW.replace("7.25", "7.25,extra")).encode(), "line 2: 9 cells under 8 columns"),
        ((HEAD + ROW.replace("7.25", "fast")).encode(), "line 2: value 'fast' is not a number"),
        ((HEAD + ROW.replace("decode", "prefill")).encode(), "line 2: section 'prefill': use one of decode, closed"),
        ((HEAD + ROW.replace("step_s", "speed")).encode(), "line 2: column 'speed': section decode has step_s, dec"),
        ((HEAD + ROW.replace("7.25", "nan")).encode(), "line 2: value 'nan' is not a number"),
        ((HEAD + ROW.replace(",3,", ",x,")).encode(), "line 2: size 'x' is not a whole number"),
        ((HEAD + ROW + '"toy,float32').encode(), "is not a CSV file"),
        (
            (DRAFTING + "eagle3,3,1,3,," + ROW).encode(),
            "line 2: give all of algorithm, draft_steps, .* or none of them",
        ),
        ((DRAFTING + ",,,,2.4," + ROW).encode(), "line 2: give all of algorithm, draft_steps, .* or none of them"),
        ((DRAFTING + "eagle3,3,1,x,2.4," + ROW).encode(), "line 2: draft_tokens 'x' is not a whole number"),
        ((DRAFTING + "eagle3,3,1,3,much," + ROW).encode(), "line 2: accept_length 'much' is not a number"),
        ((DRAFTING + "eagle3,3,1,5,2.4," + ROW).encode(), r"line 2: draft_steps=3: .* \(the root is not counted\)"),
        ((DRAFTING + "eagle4,3,1,3,2.4," + ROW).encode(), "line 2: algorithm 'eagle4' drafts nothing here; use one"),
        ((DRAFTING + "none,3,1,3,2.4," + ROW).encode(), "line 2: algorithm 'none' drafts nothing here"),
    ],
)
def test_malformed_peers_are_refused_in_one_line(tmp_path, content, said):
    (tmp_path / "peers.csv").write_bytes(content)
    with pytest.raises(SpecbatchError, match=said) as found:
        read_peers(tmp_path / "peers.csv")
    assert "\n" not in str(found.value)


def test_a_byte_order_mark_and_blank_lines_are_ignored(tmp_path):
    (tmp_path / "peers.csv").write_bytes(b"\xef\xbb\xbf" + (HEAD + "\n" + ROW).encode())
    (row,) = csv.DictReader(read_peers(tmp_path / "peers.csv").splitlines())
    assert row["model"] == "toy"


def test_the_peers_of_the_repository_can_be_shown():
    text = read_peers(Path(__file__).parents[3] / "results/h200/peers.csv")
    rows = list(csv.DictReader(text.splitlines()))
    assert {(row["model"], row["dtype"], row["gpu"]) for row in rows} == {("qwen3-8b", "bfloat16", "H200")}
    assert {row["section"] for row in rows} == {"decode", "closed", "ttft"}
    assert all(float(row["value"]) > 0 for row in rows)
    ways = {tuple(row[name] for name in DRAFTING.split(",")[:5]) for row in rows}
    assert ways == {("",) * 5, ("eagle3", "3", "1", "3", "2.4"), ("dflash", "15", "1", "15", "6.35")}
    assert all(row["column"] in KINDS[row["section"]].peers for row in rows)
    names = ("algorithm", "section", "size", "peer", "column")
    figures = {tuple(row[name] for name in names): float(row["value"]) for row in rows}
    assert len(figures) == len(rows)
    for row in rows:
        if row["algorithm"] and row["column"] == "decode_throughput":
            step_s = figures[*(row[name] for name in names[:-1]), "step_s"]
            reached = float(row["value"]) * step_s / int(row["size"])
            assert reached == pytest.approx(float(row["accept_length"]), rel=0.04)
