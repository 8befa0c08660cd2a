"""Records of a run as one compressed file, small enough to be kept beside the tables that are made from it."""

from __future__ import annotations

import io
import json
import lzma
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory

from specbatch.errors import SpecbatchError, refuse
from specbatch.files.atomic_file import write_atomic
from specbatch.records.run_record import REQUESTS
from specbatch.records.store import RECORD, WORKS

SUFFIX = ".tar.xz"
FILES = (RECORD, REQUESTS, "sweep.json", "left_out.json", "questions.jsonl", "machine.json", "peers.csv")
DROPPED = "itl_s"  # of requests: a number per token. Only the ITL percentiles over repeats need it
_MOST_BYTES = 1 << 30  # of an archive's contents


def pack(folder: Path, archive: Path) -> None:
    """Write the records below `folder`, which are its files named in `FILES`, without the field `DROPPED`.

    The same records give the same bytes. Refused: a name without `SUFFIX`, and an existing file other than such an
    archive. Raises UnwritableError.
    """
    if not archive.name.endswith(SUFFIX):
        raise refuse("records", str(archive), f"name a file that ends with {SUFFIX}")
    if archive.exists() and not _has_records(archive):
        raise refuse("records", str(archive), "already exists and has no records; name another file")
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:xz", preset=9, format=tarfile.USTAR_FORMAT) as file:
        for path in sorted(path for path in folder.rglob("*") if path.name in FILES and path.is_file()):
            data = _reduced(path) if path.name == REQUESTS else path.read_bytes()
            member = tarfile.TarInfo(path.relative_to(folder).as_posix())
            member.size = len(data)
            file.addfile(member, io.BytesIO(data))
    write_atomic(archive, content.getvalue())


def _has_records(archive: Path) -> bool:
    try:
        with tarfile.open(archive, "r|xz") as file:
            return any(PurePosixPath(member.name).name == RECORD for member in file)
    except (OSError, tarfile.TarError, lzma.LZMAError, EOFError):
        return False


def _reduced(path: Path) -> bytes:
    rows = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    kept = ({name: value for name, value in row.items() if name != DROPPED} for row in rows)
    return "".join(json.dumps(row) + "\n" for row in kept).encode()


@contextmanager
def unpacked(setting: str, path: Path) -> Iterator[Path]:
    """The folder at `path`, the value of `setting`; of an archive, or a folder in one (records.tar.xz/v2), that in a
    temporary folder with its files.

    Refused: an archive that is damaged, has members that are no plain files below it, or holds more than 1 GiB.
    """
    archive = next((one for one in (path, *path.parents) if one.name.endswith(SUFFIX) and one.is_file()), None)
    if archive is None:
        yield path
        return
    with TemporaryDirectory(prefix="specbatch-records-") as folder:
        _unpack(setting, archive, Path(folder))
        try:
            yield Path(folder) / path.relative_to(archive)
        except SpecbatchError as error:  # the temporary folder means nothing to a reader
            named = str(error.value).replace(folder, str(archive))
            if error.setting is None or error.works is None or named == str(error.value):
                raise
            raise refuse(error.setting, named, error.works.replace(folder, str(archive))) from error


def _unpack(setting: str, archive: Path, folder: Path) -> None:
    left = _MOST_BYTES
    try:
        with tarfile.open(archive, "r|xz") as file:
            for member in file:
                name = PurePosixPath(member.name)
                if member.isdir():
                    continue
                if not member.isfile() or name.is_absolute() or ".." in name.parts:
                    raise refuse(setting, str(archive), f"its member {member.name} is no plain file below it; {WORKS}")
                left -= member.size
                if left < 0:
                    raise refuse(setting, str(archive), "holds more than 1 GiB; unpack it with tar")
                place = folder / name
                place.parent.mkdir(parents=True, exist_ok=True)
                data = file.extractfile(member)
                assert data is not None
                place.write_bytes(data.read())
    except (tarfile.TarError, lzma.LZMAError, EOFError) as error:
        raise refuse(setting, str(archive), f"is no readable {SUFFIX} ({error}); {WORKS}") from None
