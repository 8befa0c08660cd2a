#!/usr/bin/env bash
# lm-eval ends with status 0 when it could not write the results of an evaluation, and they are lost.
#
# Versions: lm-eval 0.4.13.
# Expected: an error, as of any program whose output file cannot be written, or a folder with a shorter name.
# Seen:     lm-eval makes one folder name of the whole path of a model ("/a/b" becomes "__a__b"). Of a path of 255 bytes
#           or more no folder can be made. The exception is caught: the log has "Could not save results aggregated" as a
#           warning and the reason at level INFO, the table is printed, no file is written, and the status is 0. The same
#           holds for a full disk and a folder without write permission.
# Matters:  a pipeline takes the run for a success, and hours of answers are gone. specbatch writes the same files: there
#           it is an error with all answers kept, and a long name is cut.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q torch==2.13.0 lm-eval==0.4.13 transformers==5.17.0
cat > "$dir/rows.jsonl" <<'END'
{"question": "1 + 1 =", "answer": "2"}
END
cat > "$dir/sums.yaml" <<END
task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: $dir/rows.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
END
run() { # with a model at this path; the dummy model ignores it
    HF_HUB_OFFLINE=1 HF_HOME="$dir/hub" "$dir/venv/bin/lm_eval" run --model dummy --model_args "pretrained=$1" \
        --tasks "$dir/sums.yaml" --output_path "$dir/out" --log_samples > "$dir/table" 2> "$dir/log"
}
written() { find "$dir/out" -type f 2> "$dir/none" | wc -l; }

run /models/short
short=$(written)
long=/models/$(printf 'folder/%.0s' {1..40})
run "$long"
echo "status $?; files of a short path: $short; files after a path of ${#long} bytes, too: $(written)"
grep -c "Could not save" "$dir/log"
grep -q "|sums" "$dir/table"
[ "$short" = 2 ]
[ "$(written)" = 2 ]
