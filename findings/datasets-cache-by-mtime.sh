#!/usr/bin/env bash
# `datasets.load_dataset("json", data_files=FILE)` returns the rows of an earlier file if the new one has the same path and modification time, even with another size.
#
# Versions: datasets 5.2.0, pyarrow 26.0.1
# Expected: a file with four other rows gives four other rows; the cache key covers the contents, or at least the size.
# Seen:     the three rows of the earlier file, without a warning. The key of the cache has the path and the modification
#           time of a local file, and nothing else of it. With another `cache_dir` the same call reads the file.
# Matters:  prompts and benchmark questions that come from archives with fixed times (reproducible tar files, images built
#           with SOURCE_DATE_EPOCH, the Nix store), or that `cp -p` and `rsync -t` put in place: an evaluation or a
#           comparison of accept lengths runs on the prompts of the version before. specbatch reads local JSONL, CSV and
#           Parquet itself, at each run, and hashes the rows (docs/generate.md).
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check datasets==5.2.0 pyarrow==26.0.1
cd "$work"
export HF_HOME="$work/home" HF_HUB_OFFLINE=1
cat > read.py <<'PYTHON'
import json
import os
import sys

import datasets

datasets.disable_progress_bars()


def write(name: str, rows: int) -> None:
    with open("prompts.jsonl", "w") as file:
        file.writelines(json.dumps({"prompt": f"{name} {place}"}) + "\n" for place in range(rows))
    os.utime("prompts.jsonl", (315532800, 315532800))  # 1980, as in a reproducible archive


def read(**options: str) -> list[str]:
    return datasets.load_dataset("json", data_files="prompts.jsonl", split="train", **options)["prompt"][:]


write("old", 3)
first = read()
write("new question", 4)
second, afresh = read(), read(cache_dir="other")
print("first:", first, "second:", second, "afresh:", afresh, sep="\n  ")
if second != first or len(afresh) != 4 or afresh[0] != "new question 0":
    sys.exit("changed: the second reading does not have the rows of the first file")
PYTHON
"$work/venv/bin/python" read.py
echo "ok: the rows of the earlier file came back"
