"""`specbatch send-one`: the table and the stream."""

from __future__ import annotations

import json


def test_send_one_table(run, engine):
    result = run("send-one", "--max-new-tokens", 5, "--spec", "v2", "--prompt", "abc")
    lines = result.stdout.splitlines()
    assert lines[0] == "defgh"
    assert [cell.strip() for cell in lines[2].strip("|").split("|")] == [
        "Latency (s)", "Tokens", "Acc Length", "Speed (token/s)",
    ]  # fmt: skip
    assert [cell.strip() for cell in lines[4].strip("|").split("|")] == ["0.500", "5", "2.000", "10.00"]
    assert engine.built[0].max_running == 1
    assert not engine.built[0].prefix_cache


def test_send_one_streams_the_same_text(run):
    result = run("send-one", "--max-new-tokens", 4, "--prompt", "é", "--stream")
    whole = run("send-one", "--max-new-tokens", 4, "--prompt", "é", "--json")
    assert result.stdout.split("\n\n|")[0].strip("\n") == json.loads(whole.stdout)["text"].strip("\n")
    assert json.loads(whole.stdout)["accept_length"] == 1.0
    both = run("send-one", "--max-new-tokens", 4, "--prompt", "é", "--stream", "--json")
    assert json.loads(both.stdout.splitlines()[-1])["text"] == json.loads(whole.stdout)["text"]


def test_send_one_states_its_sampling(run):
    sampled = run("send-one", "--max-new-tokens", 4, "--prompt", "a", "--temperature", 0.6, "--top-k", 20, "--json")
    record = json.loads(sampled.stdout)["record"]
    assert record["workload"]["sampling"] == {"temperature": 0.6, "top_p": 1.0, "top_k": 20, "min_p": 0.0}
    greedy = run("send-one", "--max-new-tokens", 4, "--prompt", "a", "--json")
    assert json.loads(greedy.stdout)["record"]["workload"]["sampling"] is None
