"""Prompts of a given number of tokens from long text: repositories to continue, documents, worked examples of GSM8K.

repository:FOLDER   source files. Each folder in FOLDER is a repository, and the files beside them are one more. A
                    prompt is a part of one of them, its files one after the other, each under its path; the model
                    continues the last. Prompts take turns among the repositories, in seeded order
documents:FOLDER    README, licenses and other prose below FOLDER, one after the other in seeded order
many-shot           questions of GSM8K's test set after as many training examples as fit, each example used once

No two prompts share a token of text, and files with the same content are used once. Prompts of different lengths have
the same ends: the shorter one is the end of the longer one, so that what is continued is the same. Left out: files that
are not UTF-8, of more than 256 KiB (data and generated code), and texts with an end token.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from specbatch.errors import counted, refuse
from specbatch.jobs.questions import bundled_questions
from specbatch.progress.bars import Report

if TYPE_CHECKING:
    from specbatch.text.tokenizer import Tokenizer

REPOSITORY, DOCUMENTS, MANY_SHOT = "repository:", "documents:", "many-shot"
SHOT_STOP = ("Question:",)  # text that ends an answer after worked examples
_SOURCES = (
    *(".c", ".cc", ".cpp", ".cs", ".cu", ".cuh", ".go", ".h", ".hpp", ".java", ".js", ".lua", ".php", ".pl", ".py"),
    *(".pyi", ".pyx", ".rb", ".rs", ".scala", ".sh", ".sql", ".swift", ".ts"),
)
_PROSE = (".md", ".rst", ".txt")
_PROSE_NAMES = ("changelog", "changes", "contributing", "copying", "licence", "license", "metadata", "notice", "readme")
_MOST_BYTES = 256 << 10  # of a file
_LAST: dict[Any, list[Window]] = {}  # of the last call: all lengths of a sweep are ends of the same windows


class Window(NamedTuple):
    """Token ids, and the file or the question at their end."""

    tokens: list[int]
    source: str

    def end(self, tokenizer: Tokenizer, size: int) -> list[int]:
        """The last `size` tokens, of which the first is the bos token if the tokenizer adds one."""
        start = [token for token in tokenizer.encode("a")[:1] if token == tokenizer.bos_id]
        return (start + self.tokens[len(self.tokens) - size + len(start) :])[:size]


@dataclass(frozen=True)
class LongText:
    """A data set of long text. kind: one of the three names above, without its folder."""

    kind: str
    folder: Path | None = None

    @classmethod
    def named(cls, dataset: str) -> Self | None:
        """The data set of that name; None for another one. Refuses a folder that does not exist."""
        if dataset == MANY_SHOT:
            return cls(MANY_SHOT)
        kind = next((kind for kind in (REPOSITORY, DOCUMENTS) if dataset.startswith(kind)), None)
        if kind is None:
            return None
        if dataset == kind:
            raise refuse("dataset", dataset, f"name a folder with text files: {kind}FOLDER")
        folder = Path(dataset.removeprefix(kind))
        if not folder.is_dir():
            raise refuse("dataset", dataset, f"{folder} is no folder; name one with text files")
        found = cls(kind, folder)
        if not found._files():
            read = " ".join(_SOURCES) if kind == REPOSITORY else f"{' '.join(_PROSE)} README LICENSE ..."
            works = f"no file below {folder} is read, which are {read} of at most {_MOST_BYTES >> 10} KiB; name another"
            raise refuse("dataset", dataset, works)
        return found

    @property
    def stop(self) -> tuple[str, ...]:
        return SHOT_STOP if self.kind == MANY_SHOT else ()

    def digest(self) -> str:
        """sha256 of names and sizes of the files."""
        if self.folder is None:
            return bundled_questions("gsm8k_train").sha256
        found = [f"{path} {path.stat().st_size}" for files in self._files().values() for path in files]
        return hashlib.sha256("\n".join(found).encode(errors="surrogateescape")).hexdigest()

    def windows(
        self,
        tokenizer: Tokenizer,
        size: int,
        count: int,
        seed: int,
        report: Report | None = None,
        named: str = "input_len",
    ) -> list[Window]:
        """`count` windows of `size` tokens each; the first ones are the same for every count. Refused: more than the
        text has. report: of the windows, if they are not known from the last call. named: the setting that `size` is
        from."""
        asked = self, tokenizer, size, count, seed
        if asked not in _LAST:
            found = self._read(tokenizer, size, count, seed, report or (lambda done, total: None), named)
            _LAST.clear()
            _LAST[asked] = found
        return _LAST[asked]

    def _read(self, tokenizer: Tokenizer, size: int, count: int, seed: int, report: Report, named: str) -> list[Window]:
        order = random.Random(f"{seed}/long text")
        if self.folder is None:
            streams = [_with_shots(tokenizer, size, order)]
        else:
            streams = [_cut(tokenizer, size, texts) for texts in self._texts(order)]
        found: list[Window] = []
        while streams and len(found) < count:
            for stream in [*streams]:
                if len(found) == count:
                    break
                if (window := next(stream, None)) is None:
                    streams.remove(stream)
                else:
                    found.append(window)
                    report(len(found), count)
        if len(found) < count:
            has = f"{'GSM8K' if self.folder is None else self.folder} has text for {counted(len(found), 'prompt')}"
            most = "" if self.folder is None else f" or more files of at most {_MOST_BYTES >> 10} KiB"
            works = f"of {size} tokens, not {count}; use fewer prompts, shorter ones{most}"
            raise refuse(named, size, f"{has} {works}")
        return found

    def _texts(self, order: random.Random) -> Iterator[Iterator[tuple[str, str]]]:
        """The texts of each stream, with their names. A file that has the content of an earlier one is left out."""
        assert self.folder is not None
        every, seen = self._files(), set[bytes]()
        if self.kind == DOCUMENTS:
            files = [path for group in every.values() for path in group]
            order.shuffle(files)
            yield _read(self.folder, files, seen, titled=False)
            return
        for name in order.sample(sorted(every), len(every)):
            yield _read(self.folder, every[name], seen, titled=True)

    def _files(self) -> dict[str, list[Path]]:
        """Of each folder in the folder, sorted; those beside them as "."."""
        assert self.folder is not None
        found: dict[str, list[Path]] = {}
        for entry in sorted(self.folder.iterdir()):
            if entry.name.startswith((".", "__pycache__")):
                continue
            group = found.setdefault(entry.name if entry.is_dir() else ".", [])
            group += [path for path in (_below(entry) if entry.is_dir() else [entry]) if self._is_used(path)]
        return {name: files for name, files in found.items() if files}

    def _is_used(self, path: Path) -> bool:
        suffix, name = path.suffix.lower(), path.name.lower()
        if self.kind == REPOSITORY:
            usable = suffix in _SOURCES
        else:
            usable = suffix in _PROSE or (not suffix and name.startswith(_PROSE_NAMES))
        return usable and path.is_file() and 0 < path.stat().st_size <= _MOST_BYTES


def _below(folder: Path) -> Iterator[Path]:
    """All files below a folder, sorted. Links are not followed. Raises OSError for a folder that cannot be read."""

    def fail(error: OSError) -> None:
        raise error

    for place, folders, names in os.walk(folder, onerror=fail):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__pycache__")))
        yield from (Path(place) / name for name in sorted(names))


def _read(root: Path, files: list[Path], seen: set[bytes], *, titled: bool) -> Iterator[tuple[str, str]]:
    """Names and texts of files, each with its name as a comment above it if `titled`."""
    for path in files:
        content = path.read_bytes()
        if (digest := hashlib.sha256(content).digest()) in seen:
            continue
        seen.add(digest)
        try:
            text = content.decode()
        except UnicodeDecodeError:
            continue
        name = os.fsencode(path.relative_to(root)).decode(errors="replace")
        yield name, f"# {name}\n{text}\n" if titled else f"{text}\n"


def _cut(tokenizer: Tokenizer, size: int, texts: Iterator[tuple[str, str]]) -> Iterator[Window]:
    """Texts that follow each other, cut into windows."""
    tokens: list[int] = []
    for source, text in texts:
        found = tokenizer.encode(text, add_special_tokens=False)
        if not tokenizer.eos_ids.isdisjoint(found):
            continue
        tokens += found
        for end in range(size, len(tokens) + 1, size):
            yield Window(tokens[end - size : end], source)
        del tokens[: len(tokens) // size * size]


def _with_shots(tokenizer: Tokenizer, size: int, order: random.Random) -> Iterator[Window]:
    """Test questions after training examples, the first of which is cut to the size."""
    train, test = (bundled_questions(name).rows for name in ("gsm8k_train", "gsm8k"))
    shots = iter(order.sample(train, len(train)))
    for place in order.sample(range(len(test)), len(test)):
        asked = tokenizer.encode(f"Question: {test[place]['question']}\nAnswer:", add_special_tokens=False)
        parts, length = [asked], len(asked)
        while length < size:
            if (shot := next(shots, None)) is None:
                return
            text = f"Question: {shot['question']}\nAnswer: {shot['answer']}\n\n"
            parts.append(tokenizer.encode(text, add_special_tokens=False))
            length += len(parts[-1])
        yield Window([token for part in reversed(parts) for token in part][-size:], f"question {place + 1}")
