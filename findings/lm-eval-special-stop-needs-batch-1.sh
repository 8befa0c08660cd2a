#!/usr/bin/env bash
# With a batch, lm-eval's HF backend scores text after a stop string that is a special token; with batch size 1 it does not.
#
# Versions: lm_eval 0.4.13, transformers 5.23.0, torch 2.13.0.
# Expected: the answers of a greedy model, which end at the first stop string of the task, do not depend on the batch
#           size.
# Seen:     an answer "1 <|im_end|> 2 3" with until=["<|im_end|>"] is "1" with batch size 1 and "1 2 3 3 3" with batch
#           size 2. A row goes on until all rows of its batch have stopped, and its text is then decoded without special
#           tokens, so that the stop string is not found in it.
# Matters:  until of gsm8k has <|im_end|>, and flexible-extract takes the last number, also of what follows. The same
#           happens with the tokenizer's eos token where generation_config.json has another one: with
#           Qwen2.5-Coder-1.5B from a GGUF file and batch size 128, flexible-extract lost 3 points on GSM8K.
#           `specbatch eval` ends an answer at such tokens in every batch; see docs/evaluation.md, "Compared with
#           lm-eval".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet lm_eval==0.4.13 transformers==5.23.0 torch==2.13.0 accelerate==1.15.0 peft==0.21.2
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - <<'PYTHON'
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

words = ["</s>", "<|im_end|>", "short", "long", "1", "2", "3", "4"]
ids = {word: index for index, word in enumerate(words)}
inner = Tokenizer(models.WordLevel(ids, unk_token="4"))
inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=inner, eos_token="</s>", pad_token="</s>", extra_special_tokens=["<|im_end|>"]
)
sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_hidden_layers": 0, "vocab_size": 8}
config = LlamaConfig(**sizes, tie_word_embeddings=False, eos_token_id=0, bos_token_id=None, pad_token_id=0)
model = LlamaForCausalLM(config).eval()
following = {"short": "1", "1": "<|im_end|>", "<|im_end|>": "2", "2": "3", "3": "3", "long": "4", "4": "4", "</s>": "</s>"}
with torch.no_grad():  # each token has one successor
    model.model.embed_tokens.weight.copy_(torch.eye(8))
    model.lm_head.weight.zero_()
    for word, successor in following.items():
        model.lm_head.weight[ids[successor], ids[word]] = 1.0

arguments = {"until": ["<|im_end|>"], "max_gen_toks": 6, "do_sample": False}
answers = {}
for size in (1, 2):
    requests = [Instance("generate_until", {}, (prompt, arguments), index) for index, prompt in enumerate(("short", "long"))]
    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=size, device="cpu")
    answers[size] = lm.generate_until(requests, disable_tqdm=True)[0]
print(answers)
assert answers == {1: "1", 2: "1 2 3 3 3"}, answers
PYTHON
echo "ok: what follows the stop string is part of the answer with batch size 2 only"
