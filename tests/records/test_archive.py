"""Records in one compressed file: what is kept, the same bytes each time, and archives that are refused."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest
from swept import saved, swept

import specbatch
from specbatch.errors import SpecbatchError
from specbatch.records.archive import pack, unpacked
from specbatch.records.runs import read_records
from specbatch.sweeps.report.report import write_report

RECORDS = [swept(name, 4) for name in ("baseline", "v1")]


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    folder = saved(tmp_path / "sweep", *RECORDS)
    (folder / "sweep.json").write_text(
        '{"configurations": {"baseline": {}, "v1": {}}, "concurrency": [4], "repeats": 2}'
    )
    (folder / "summary.md").write_text("made from records")
    pack(folder, tmp_path / "records.tar.xz")
    return tmp_path / "records.tar.xz"


def test_records_are_kept_without_times_between_tokens(archive, tmp_path) -> None:
    with unpacked("folder", archive) as found:
        names = {path.relative_to(found).as_posix() for path in found.rglob("*") if path.is_file()}
        point = found / "v1/c4/r1"
        assert (point / "record.json").read_bytes() == (tmp_path / "sweep/v1/c4/r1/record.json").read_bytes()
        rows = [json.loads(line) for line in (point / "requests.jsonl").read_text().splitlines()]
    assert names == {"sweep.json"} | {
        f"{name}/c4/r1/{file}" for name in ("baseline", "v1") for file in ("record.json", "requests.jsonl")
    }
    assert rows == [{key: value for key, value in row.items() if key != "itl_s"} for row in RECORDS[1].requests]
    assert not found.exists()
    pack(tmp_path / "sweep", tmp_path / "again.tar.xz")
    assert (tmp_path / "again.tar.xz").read_bytes() == archive.read_bytes()


def test_a_folder_in_an_archive(archive, tmp_path) -> None:
    """As errors name the runs in it."""
    (found,) = read_records("runs", archive / "v1", lambda output: [])
    assert (found[0], found[1].workload["configuration"]) == (archive / "v1/c4/r1", "v1")
    assert specbatch.load_run(archive / "v1/c4").points.configuration.tolist() == ["v1"]
    with pytest.raises(SpecbatchError, match=r"records\.tar\.xz/v3': no such file or folder"):
        read_records("runs", archive / "v3", lambda output: [])


def test_a_folder_is_itself(tmp_path) -> None:
    with unpacked("folder", tmp_path) as found:
        assert found == tmp_path


@pytest.mark.usefixtures("no_plots")
def test_report_and_frames_read_an_archive(archive, tmp_path) -> None:
    write_report(tmp_path / "sweep")
    write_report(archive, tmp_path / "out")
    same = ("summary.md", "summary.csv", "acceptance.md", "acceptance.json", "concurrency.csv")
    for name in same:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "sweep" / name).read_bytes()
    assert (
        "2 points without a record (1 of baseline at concurrency 4, 1 of v1"
        in (tmp_path / "out/summary.md").read_text()
    )
    assert f"specbatch report {archive} --output" in (tmp_path / "out/report.html").read_text()
    run = specbatch.load_run(archive)
    assert run.points.path.tolist() == [f"{archive}/{name}/c4/r1" for name in ("baseline", "v1")]
    with pytest.raises(SpecbatchError, match=r"output='': an archive is only read: name a folder"):
        write_report(archive)
    with pytest.raises(SpecbatchError, match=f"^folder='{archive}/baseline': holds no records of a sweep"):
        write_report(archive / "baseline", tmp_path / "out")
    answers = tmp_path / "answers.jsonl"
    answers.touch()
    with pytest.raises(SpecbatchError, match=r"folder='.*answers.jsonl': is a file; name the folder of a sweep"):
        write_report(answers)


def test_name_of_an_archive(tmp_path) -> None:
    with pytest.raises(SpecbatchError, match=r"records='.*zip': name a file that ends with \.tar\.xz"):
        pack(tmp_path, tmp_path / "records.zip")


@pytest.mark.parametrize("name", ["../x", "/x", "link"])
def test_members_outside_are_refused(tmp_path, name) -> None:
    path = tmp_path / "a.tar.xz"
    with tarfile.open(path, "w:xz") as file:
        member = tarfile.TarInfo(name)
        if name == "link":
            member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
        file.addfile(member, io.BytesIO())
    with pytest.raises(SpecbatchError, match=rf"its member {name} is no plain file below it"), unpacked("folder", path):
        pass


def test_damaged_and_too_large_archives_are_refused(archive: Path, tmp_path: Path) -> None:
    huge = tarfile.TarInfo("huge")
    huge.size = 1 << 31
    with tarfile.open(tmp_path / "huge.tar.xz", "w:xz") as file:
        file.addfile(huge)  # its header alone
    for content, reason in (
        (b"", r"is no readable \.tar\.xz"),
        (b"no archive", r"is no readable \.tar\.xz"),
        (archive.read_bytes()[:200], r"is no readable \.tar\.xz"),
        ((tmp_path / "huge.tar.xz").read_bytes(), "holds more than 1 GiB"),
    ):
        (tmp_path / "b.tar.xz").write_bytes(content)
        with pytest.raises(SpecbatchError, match=reason), unpacked("x", tmp_path / "b.tar.xz"):
            pass


def test_other_files_are_not_replaced(archive: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.tar.xz"
    for content in (b"mine", b""):
        mine.write_bytes(content)
        with pytest.raises(SpecbatchError, match="already exists and has no records; name another file"):
            pack(tmp_path / "sweep", mine)
        assert mine.read_bytes() == content
    pack(tmp_path / "sweep", archive)
