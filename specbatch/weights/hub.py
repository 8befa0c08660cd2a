"""Files from the model hub, through `huggingface_hub` and its cache."""

from __future__ import annotations

from pathlib import Path

from specbatch.errors import refuse

MODEL_FILES = ["*.json", "*.safetensors", "*.jinja", "merges.txt", "tokenizer.model"]
TOKENIZER_FILES = ["*.json", "*.jinja", "merges.txt", "tokenizer.model"]


def snapshot(setting: str, name: str, patterns: list[str], *, works: str, local_dir: Path | None = None) -> Path:
    """The folder with the files of `owner/model` or `owner/model@revision` that match `patterns`.

    What the hub's cache holds is not asked for again; `local_dir` puts the files there, past the cache. Where
    the hub cannot give them, raises SpecbatchError for `setting` that ends with what `works`.
    """
    from huggingface_hub import snapshot_download

    repository, _, revision = name.partition("@")
    try:
        found = snapshot_download(
            repository,
            revision=revision or None,
            allow_patterns=patterns,
            ignore_patterns=["consolidated*", "original/*"],
            local_dir=local_dir,
        )
    except Exception as error:  # the hub's, the network's and the disk's errors have no common kind
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise refuse(setting, name, f"the model hub did not give it ({lines[0].rstrip('.')}); {works}") from None
    return Path(found)
