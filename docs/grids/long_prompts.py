"""Writes prompts of long text as JSONL of token ids, for `specbatch train-draft --data`.

    python docs/grids/long_prompts.py repository:FOLDER --model MODEL --tokens 7680 --prompts 600 --out prompts.jsonl

The prompts are those of `specbatch sweep --dataset repository:FOLDER`: take another folder than the one to measure on.
With the same --window, prompts of several lengths have the same ends, so that heads for each see the same answers but
for their contexts.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from specbatch.errors import SpecbatchError
from specbatch.jobs.long_text import LongText
from specbatch.progress.bars import progress
from specbatch.sweeps.run.runner import TOKENIZING
from specbatch.sweeps.workload.workloads import Workload
from specbatch.weights import open_checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", help="repository:FOLDER, documents:FOLDER or many-shot")
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--window", type=int, default=0)
    parser.add_argument("--prompts", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    try:
        if LongText.named(given.dataset) is None:
            parser.error(f"{given.dataset!r} is not long text; use repository:FOLDER, documents:FOLDER or many-shot")
        given.out.parent.mkdir(parents=True, exist_ok=True)
        tokenizer = open_checkpoint(given.model, log=print).tokenizer()
        text = Workload(given.dataset, input_len=given.tokens, window=given.window, seed=given.seed, output_len=1)
        with progress(TOKENIZING, "prompts") as report:
            rows = text.prompts(tokenizer, given.prompts, report)
    except SpecbatchError as error:
        parser.error(str(error).replace("input_len=", "--tokens=").replace("window=", "--window="))
    given.out.write_text("".join(json.dumps({"prompt_token_ids": row}) + "\n" for row in rows))
    print(f"{given.out}: {len(rows)} prompts of {given.tokens} tokens")


if __name__ == "__main__":
    main()
