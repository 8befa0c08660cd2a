"""What a CSV of other engines' figures may hold."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from specbatch.errors import SpecbatchError
from specbatch.sweeps.peers import read_peers

HEAD = "model,dtype,gpu,section,size,column,peer,value\n"
ROW = "toy,float32,,decode,3,step_ms,Theirs,7.25\n"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\x00\xff\xfe binary", "is no text in UTF-8"),
        (b"", "needs the columns model, dtype"),
        (b"a,b\n1,2\n", "needs the columns model, dtype"),
        ((HEAD + ROW + "toy,float32,,decode\n").encode(), "line 3: 4 cells under 8 columns"),
        ((HEAD + ROW.replace("7.25", "7.25,extra")).encode(), "line 2: 9 cells under 8 columns"),
        ((HEAD + ROW.replace("7.25", "fast")).encode(), "line 2: value 'fast' is no number"),
        ((HEAD + ROW.replace("7.25", "nan")).encode(), "line 2: value 'nan' is no number"),
        ((HEAD + ROW.replace(",3,", ",x,")).encode(), "line 2: size 'x' is no whole number"),
        ((HEAD + ROW + '"toy,float32').encode(), "is no CSV"),
    ],
)
def test_what_cannot_be_shown_is_refused_in_one_line(tmp_path, content, said):
    (tmp_path / "peers.csv").write_bytes(content)
    with pytest.raises(SpecbatchError, match=said) as found:
        read_peers(tmp_path / "peers.csv")
    assert "\n" not in str(found.value)


def test_a_byte_order_mark_and_blank_lines_are_nothing(tmp_path):
    (tmp_path / "peers.csv").write_bytes(b"\xef\xbb\xbf" + (HEAD + "\n" + ROW).encode())
    (row,) = csv.DictReader(read_peers(tmp_path / "peers.csv").splitlines())
    assert row["model"] == "toy"


def test_the_peers_of_the_repository_can_be_shown():
    text = read_peers(Path(__file__).parents[2] / "results/h200/peers.csv")
    rows = list(csv.DictReader(text.splitlines()))
    assert {(row["model"], row["dtype"], row["gpu"]) for row in rows} == {("qwen3-8b", "bfloat16", "H200")}
    assert {row["section"] for row in rows} == {"decode", "closed", "ttft"}
    assert all(float(row["value"]) > 0 for row in rows)
