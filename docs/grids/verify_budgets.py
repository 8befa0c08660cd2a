"""Tokens per second with `--verify-budget auto`, three fixed budgets and none, on the shape of Qwen3-8B with EAGLE-3.

python docs/grids/verify_budgets.py [--points 1x256,8x256,32x192,128x128,256x96] [--repeats 3] [--log FILE]

Weights are random. A point is REQUESTSxTOKENS, all requests at once, prompts in the prefix cache. Acceptance is
simulated together with the confidence in each draft, both hashes of the request's slot, its length and the place of the
draft: the confidence is about that of the request's text, which changes every 16 tokens, and a draft is accepted with
the probability that its confidence says. One engine has no budget; another has `auto` and also runs the fixed ones, by
a forced choice. Variants run one after the other, in opposite order in every second repeat, and each starts with
nothing learnt.
"""

import argparse
import copy
import json
import random
import time
from dataclasses import replace

import torch

from specbatch import Engine, EngineConfig, SamplingParams, Speculation
from specbatch.config.engine_config import Graphs
from specbatch.engine.device import step as device_step
from specbatch.engine.device.step import DecodeStep
from specbatch.engine.schedule.draft_length import Choice
from specbatch.engine.schedule.verify_rows import VerifyRows
from specbatch.kernels.sampling.rng import acceptance_thresholds

DRAFTS, PROMPT, SIZE = 7, 64, 1 << 20
parser = argparse.ArgumentParser()
parser.add_argument("--points", default="1x256,8x256,32x192,128x128,256x96")
parser.add_argument("--repeats", type=int, default=3)
parser.add_argument("--fixed", default="1.5,2.5,4")
parser.add_argument("--log", default="verify-budgets.jsonl")
args = parser.parse_args()
points = [tuple(map(int, point.split("x"))) for point in args.points.split(",")]
fixed = [float(budget) for budget in args.fixed.split(",")]

table = torch.rand(3, SIZE, generator=torch.Generator().manual_seed(7)).to("cuda")
places = torch.arange(DRAFTS, device="cuda")
thresholds = acceptance_thresholds((1.0,) * DRAFTS, torch.device("cuda"))


def drawn(step):
    """Confidence [requests, DRAFTS] and number of accepted drafts [requests] of a step."""
    slots, lengths = step.slots[:, None] * 40503, step.lengths[:, None]
    text = table[0][(slots + (lengths >> 4) * 9973) % SIZE]
    at = (slots + lengths * 769 + places * 7) % SIZE
    confidence = 0.7 * text + 0.3 * table[1][at]
    return confidence, (table[2][at] < confidence).long().cumprod(1).sum(1)


def propose(self, step, original=DecodeStep.propose):
    proposal = original(self, step)
    return proposal._replace(confidence=drawn(step)[0]) if step.needs_confidence else proposal


def accept(self, step, proposal, verified):
    shown = proposal._replace(drafted=torch.minimum(proposal.drafted, drawn(step)[1]))
    return device_step.accept(step, shown, verified.scores, verified.positions, thresholds, "token")


DecodeStep.propose, DecodeStep.accept = propose, accept

rows, longest = max(requests for requests, _ in points), PROMPT + max(tokens for _, tokens in points) + 64
speculation = Speculation(algorithm="eagle3", draft="dummy", draft_tokens=DRAFTS, schedule="v2")
config = EngineConfig(
    model="qwen3-8b", load_format="dummy", dtype="bfloat16", max_running=rows, max_model_len=longest,
    kv_pages=rows * (longest // 16 + 2) + 64, graphs=Graphs(decode="whole", prefill="off"), speculation=speculation,
)  # fmt: skip
chooses = Engine(replace(config, speculation=replace(speculation, verify_budget="auto")))
engines = {"none": Engine(config, weights_of=chooses)}
chooser = chooses.parts.draft_length
fresh = copy.deepcopy(vars(chooser))
original = {name: getattr(VerifyRows, name) for name in ("choose", "learn", "took")}


def run(name, prompts, tokens):
    """Tokens per second, and the record."""
    for method, function in original.items():
        setattr(VerifyRows, method, function)
    if name not in ("none", "auto"):
        VerifyRows.choose = lambda self, count, describe: Choice(DRAFTS, budget=float(name))
        VerifyRows.learn = VerifyRows.took = lambda self, *_: None
    engine = engines.get(name, chooses)
    with torch.inference_mode():
        engine.parts.worker.decode_step.forget()
    vars(chooser).update(copy.deepcopy(fresh))
    engine.reset_record()
    torch.cuda.synchronize()
    start = time.perf_counter()
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    done = engine.generate(prompts, params, concurrency=len(prompts))
    seconds = time.perf_counter() - start
    return sum(len(item.token_ids) for item in done) / seconds, engine.record(concurrency=len(prompts))


draws = random.Random(3)
names = ["none", *(f"{budget:g}" for budget in fixed), "auto"]
for requests, tokens in points:
    prompts = [[draws.randrange(10, 48000) for _ in range(PROMPT)] for _ in range(requests)]
    for name in names:  # prompts into the prefix cache, late recordings of graphs
        run(name, prompts, 24)
    speeds, records = {name: [] for name in names}, {}
    for repeat in range(args.repeats):
        for name in names[:: -1 if repeat % 2 else 1]:
            speed, records[name] = run(name, prompts, tokens)
            speeds[name].append(round(speed))
    line = {"requests": requests, "tokens": tokens, "tok_s": speeds}
    line["accept_length"] = {name: round(record.metrics["accept_length"], 3) for name, record in records.items()}
    line["budgets"] = records["auto"].counters["verify_budgets"]
    print(json.dumps(line), flush=True)
    with open(args.log, "a") as file:
        file.write(json.dumps(line) + "\n")
