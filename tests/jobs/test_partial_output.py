"""The partial output of a job: which files a job continues, and which it rejects unchanged."""

from __future__ import annotations

import fcntl
import json
import tracemalloc
from contextlib import suppress

import pytest

from specbatch.errors import ChangedError, SpecbatchError
from specbatch.jobs.partial_output import PartialRows
from specbatch.records.differences import describe_differences

HEADER = {"model": "a", "place": "here", "limit": 3}
ROWS = [{"index": index, "text": "é"} for index in (2, 0)]


def text_of(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def opened(tmp_path):
    def make(header=HEADER):
        return PartialRows(
            tmp_path / "rows", header, lambda row: row["index"] in range(3), start_over="go", may_differ=("place",)
        )

    return make


@pytest.mark.parametrize(
    ("left", "taken"),
    [
        ("", []),
        (text_of(HEADER)[:9], []),
        (text_of(HEADER), []),
        (text_of(HEADER | {"limit": 5}), []),  # of another job, which had finished nothing
        (text_of(HEADER, *ROWS), ROWS),
        (text_of(HEADER, *ROWS) + '{"index": 1, "te', ROWS),
        (text_of(HEADER | {"place": "there"}, *ROWS), ROWS),
    ],
)
def test_job_continues_from_what_a_crash_leaves(opened, left, taken):
    kept = opened()
    kept.path.write_text(left)
    kept.load()
    assert list(kept.rows.values()) == sorted(taken, key=lambda row: row["index"])
    more = {"index": 1, "text": ""}
    with kept.claim() as keep:
        keep(more)
    header, *rows = map(json.loads, kept.path.read_text().splitlines())
    assert header | {"place": "here"} == HEADER
    assert rows == [*taken, more]


@pytest.mark.parametrize(
    ("left", "message"),
    [
        ("notes", "rows': is not the partial output of a job"),
        ("notes\n", "rows': is not the partial output of a job"),
        (text_of(ROWS[0]), "rows': is not the partial output of a job"),
        (
            text_of(HEADER | {"limit": 5, "place": "there"}, *ROWS),
            "another place ('there' there, 'here' now), limit (5 there",
        ),
        (text_of(HEADER | {"limit": 5}, *ROWS), "rows': was made with another limit (5 there, 3 now); finish"),
        (
            text_of({"model": "a", "limit": 3, "older": 1}, *ROWS),
            "rows': was started by another version, which did not save place; finish it with that version, name",
        ),
        (text_of(HEADER, ROWS[0], {"text": ""}), "rows:3': is not a row"),
        (text_of(HEADER, {"index": 3}), "rows:2': is not a row"),
        (text_of(HEADER, {"index": "a"}), "rows:2': is not a row"),
        (text_of(HEADER, 5), "rows:2': is not a row"),
        (text_of(HEADER) + "\udcff\n", "rows:2': is not a row"),
    ],
)
def test_other_files_are_an_error_and_unchanged(opened, left, message):
    kept = opened()
    kept.path.write_text(left, errors="surrogateescape")
    with pytest.raises(SpecbatchError) as caught:
        kept.load()
    assert message in str(caught.value)
    assert kept.path.read_bytes() == left.encode(errors="surrogateescape")


def test_file_that_another_process_removes_before_the_lock_is_made_again(opened, monkeypatch):
    kept = opened()
    kept.path.write_text(text_of(HEADER, *ROWS))
    flock, calls = fcntl.flock, []

    def removed_first(*args):
        if not calls:
            kept.path.unlink()
        calls.append(args)
        flock(*args)

    monkeypatch.setattr(fcntl, "flock", removed_first)
    with kept.claim() as keep:
        keep(ROWS[0])
    assert len(calls) == 2
    assert kept.path.read_text() == text_of(HEADER, ROWS[0])


def test_last_row_with_an_index_counts_and_failed_ones_are_counted(opened):
    kept = opened()
    kept.path.write_text(
        text_of(HEADER, {"index": 2, "error": "x"}, {"index": 0, "error": "y"}, {"index": 2, "error": None})
    )
    kept.load()
    assert (len(kept.rows), kept.rows.failed) == (2, 1)
    assert (2 in kept.rows, 1 in kept.rows, 7 in kept.rows, "2" in kept.rows) == (True, False, False, False)
    assert kept.rows[2] == {"index": 2, "error": None}
    assert [row["index"] for row in kept.rows.ordered()] == [0, 2]
    with kept.claim() as keep:
        keep({"index": 0})
        assert kept.rows.failed == 0
    with pytest.raises(KeyError):
        kept.rows[1]


def test_failed_rows_are_missing_when_they_are_retried(tmp_path):
    path = tmp_path / "rows"
    path.write_text(text_of(HEADER, {"index": 2, "error": "x"}, ROWS[1]))
    kept = PartialRows(path, HEADER, lambda row: True, start_over="go", retry_failed=True)
    kept.load()
    assert list(kept.rows) == [0]
    with kept.claim() as keep:
        keep({"index": 2})
    assert path.read_text() == text_of(HEADER, {"index": 2, "error": "x"}, ROWS[1], {"index": 2})


def test_memory_holds_offsets_and_no_rows(tmp_path):
    path, count = tmp_path / "rows", 20_000
    rows = (json.dumps({"index": index, "text": "x" * 200}) + "\n" for index in range(count))
    path.write_text(text_of(HEADER) + "".join(rows))
    kept = PartialRows(path, HEADER, lambda row: True, start_over="go")
    tracemalloc.start()
    kept.load()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(kept.rows) == count
    assert held < 12 * count  # the array grows by more than it needs
    assert kept.rows[count - 1]["index"] == count - 1


def test_folder_is_an_error(opened):
    kept = opened()
    kept.path.mkdir()
    with pytest.raises(SpecbatchError, match=r"rows': cannot be read \(Is a directory\)"):
        kept.load()


def test_settings_that_an_older_version_lacks_are_reported_as_new():
    old, new = ({"engine": {"seed": seed} | more} for seed, more in ((1, {"gone": 2}), (3, {"fresh": True})))
    found = describe_differences(old, new, ["engine"])
    assert found == "seed (1 there, 3 now), fresh (not set by the version there, True now)"


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda path: path.unlink(), "was removed or replaced"),
        (lambda path: (path.unlink(), path.write_text("mine")), "was removed or replaced"),
        (lambda path: path.write_bytes(b""), "was changed"),
        (lambda path: path.write_text(path.read_text() + "mine"), "was changed"),
    ],
)
def test_change_by_something_else_is_found(opened, change, what):
    """For every command with a partial output: no row is written, nothing is called kept, and no other file removed."""
    kept = opened()
    with kept.claim() as keep:
        keep(ROWS[0])
        assert kept.or_lost("kept 1 row") == "kept 1 row"
        change(kept.path)
        after = kept.path.read_bytes() if kept.path.exists() else None
        with pytest.raises(ChangedError, match=f"{what} by something else during the job, so its answers are lost"):
            keep(ROWS[1])
        assert "its answers are lost" in kept.or_lost("kept 1 row")
        kept.remove()
    assert (kept.path.read_bytes() if kept.path.exists() else None) == after
    with suppress(ChangedError):  # no error of JSON or of the operating system
        assert list(kept.rows.ordered()) == [ROWS[0]]


def test_finished_partial_output_is_removed(opened):
    kept = opened()
    with kept.claim() as keep:
        keep(ROWS[0])
        kept.remove()
    assert not kept.path.exists()
