"""Fine-tunes a model on questions with reference answers, and saves checkpoints on the way, for tables of stale drafts.

    python docs/grids/fine_tune.py MODEL --steps 0,50,200 --lr 1e-5 --out checkpoints
    specbatch sweep --model checkpoints/step-0,checkpoints/step-50 --algorithm eagle3 --draft HEAD

MODEL is a folder that transformers reads, OUT a new one. The data are GSM8K's training questions, which are bundled, or
JSONL with `question` and `answer`; the loss is that of the answers. Weights and AdamW's states are FP32; on a GPU the
passes are BF16. `--lora RANK` trains adapters of all linear layers instead (needs `pip install peft`), which takes a
quarter of the memory; checkpoints have them merged. OUT/steps.jsonl has a line per checkpoint: the mean loss since the
one before, and how far the weights have moved relative to their size.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from specbatch.errors import SpecbatchError
from specbatch.jobs.questions import bundled_questions, read_questions
from specbatch.models.config import ModelConfig
from specbatch.text.tokenizer import Tokenizer
from specbatch.weights.checkpoint import read_config

IGNORED = -100  # a label without loss


def batches(tokenizer: Tokenizer, rows: list[dict[str, str]], size: int, seed: int) -> Any:
    """Endless batches of token ids and labels, padded at the right."""
    order, end = random.Random(seed), min(tokenizer.eos_ids)
    while True:
        shuffled = order.sample(rows, len(rows))
        for begin in range(0, len(shuffled) - size + 1, size):
            found = []
            for row in shuffled[begin : begin + size]:
                asked = tokenizer.encode(f"Question: {row['question']}\nAnswer:")
                answer = [*tokenizer.encode(f" {row['answer']}", add_special_tokens=False), end]
                found.append((asked + answer, [IGNORED] * len(asked) + answer))
            longest = max(len(ids) for ids, _ in found)
            yield tuple(
                torch.tensor([one + [filler] * (longest - len(one)) for one in side])
                for side, filler in zip(zip(*found, strict=True), (end, IGNORED), strict=True)
            )


def moved(model: Any, first: dict[str, torch.Tensor]) -> float:
    """The norm of the change of all weights, relative to their norm."""
    change = sum(
        float((weight.detach().cpu() - first[name]).float().square().sum()) for name, weight in model.named_parameters()
    )
    return (change / sum(float(weight.float().square().sum()) for weight in first.values())) ** 0.5


def steps(text: str) -> list[int]:
    try:
        found = sorted({int(step) for step in text.split(",")})
    except ValueError:
        found = [-1]
    if found[0] < 0:
        raise argparse.ArgumentTypeError(f"{text!r}: use numbers of steps, such as 0,50,200")
    return found


def count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r}: use a number of 1 or more")
    return int(text)


def rate(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 <= found < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: use a number of 0 or more, such as 1e-5")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--steps", type=steps, default="0,50,200,800")
    parser.add_argument("--lr", type=rate, default=1e-5)
    parser.add_argument("--batch", type=count, default=16)
    parser.add_argument("--lora", type=count, metavar="RANK", help="train adapters of this rank; default: all weights")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    saved = given.steps
    if not given.model.is_dir():
        parser.error(f"MODEL={str(given.model)!r}: must be a folder; use that of `hf download` for a hub id")
    if given.out.exists():
        parser.error(f"--out={str(given.out)!r} exists; name a new folder")
    try:
        dtype = ModelConfig.from_dict(read_config(given.model / "config.json")).dtype or "float32"
        tokenizer = Tokenizer.from_folder(given.model)
        rows = (read_questions("data", given.data) if given.data else bundled_questions("gsm8k_train")).rows
    except SpecbatchError as error:
        parser.error(str(error))
    if given.batch > len(rows):
        parser.error(f"--batch={given.batch}: there are {len(rows)} questions; use at most as many")
    if given.lora and find_spec("peft") is None:
        parser.error(f"--lora={given.lora} needs peft: pip install peft")
    try:
        torch.empty(0, device=given.device)
    except (RuntimeError, AssertionError) as error:
        parser.error(f"--device={given.device!r}: {str(error).splitlines()[0]}")
    torch.manual_seed(given.seed)
    kept = getattr(torch, dtype) if given.lora else torch.float32
    try:
        model = AutoModelForCausalLM.from_pretrained(given.model, dtype=kept).to(given.device)
    except (OSError, ValueError) as error:
        parser.error(f"MODEL={str(given.model)!r}: {str(error).splitlines()[0]}")
    first = {name: weight.detach().cpu().clone() for name, weight in model.named_parameters()}
    if given.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=given.lora, lora_alpha=2 * given.lora, target_modules="all-linear"))
    else:
        model.gradient_checkpointing_enable()  # transformers 5.23 warns of a new name, which earlier ones lack
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=given.lr, weight_decay=0.0)
    source, losses = batches(tokenizer, rows, given.batch, given.seed), list[float]()
    given.out.mkdir(parents=True)
    for step in range(saved[-1] + 1):
        if step in saved:
            whole = copy.deepcopy(model).merge_and_unload() if given.lora else model
            line = {"step": step, "loss": sum(losses) / len(losses) if losses else None, "moved": moved(whole, first)}
            save(whole, given.model, given.out / f"step-{step}", getattr(torch, dtype))
            del whole
            settings = {name: getattr(given, name) for name in ("lr", "batch", "lora", "seed")}
            with (given.out / "steps.jsonl").open("a") as file:
                file.write(json.dumps(line | settings) + "\n")
            print(json.dumps(line), flush=True)
            losses = []
        if step == saved[-1]:
            break
        for group in optimizer.param_groups:
            group["lr"] = given.lr * min(1.0, (step + 1) / 20)
        ids, labels = (side.to(given.device) for side in next(source))
        with torch.autocast(torch.device(given.device).type, torch.bfloat16, enabled=given.device != "cpu"):
            loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())


def save(model: Any, source: Path, folder: Path, dtype: torch.dtype) -> None:
    """A folder like `source` with the weights as they are now. Tied matrices are stored once."""
    from safetensors.torch import save_file

    folder.mkdir()
    for path in source.iterdir():
        if path.is_file() and path.suffix not in (".safetensors", ".bin") and not path.name.endswith(".index.json"):
            shutil.copy(path, folder)
    weights = {name: weight.detach().to("cpu", dtype).contiguous() for name, weight in model.named_parameters()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()
