"""Prefix caches of servers: emptied, salted, not used, or reported as not emptied."""

from __future__ import annotations

import pytest

from specbatch.servers import server_cache
from specbatch.servers.client import StatusError
from specbatch.servers.server_cache import ServerCache


def absent(path: str) -> str:
    raise StatusError(404, "Not Found")


@pytest.mark.parametrize("owner", [None, "vllm", "sglang", "me"])
def test_an_endpoint_is_used_where_there_is_one(owner):
    asked = []
    cache = ServerCache(owner, lambda path: asked.append(path) or "")
    assert (cache.fields, cache.state) == ({}, "not emptied yet")
    cache.forget()
    assert (asked, cache.fields, cache.state) == (["/flush_cache"], {}, "emptied by /flush_cache")


@pytest.mark.parametrize("owner", [None, "sglang", "library"])
def test_a_cache_that_cannot_be_emptied_is_reported(owner):
    cache = ServerCache(owner, absent)
    cache.forget()
    assert (cache.fields, cache.state) == ({}, "NOT EMPTIED: the server has no endpoint for that")


def test_llamacpp_gets_no_cached_prompt_from_its_first_request_on():
    cache = ServerCache("llamacpp", absent)
    for _ in range(2):
        assert (cache.fields, cache.state) == ({"cache_prompt": False}, "not used (cache_prompt=false)")
        cache.forget()


def test_vllm_gets_a_new_salt_only_where_it_cannot_be_emptied(monkeypatch):
    monkeypatch.setattr(server_cache, "EMPTYING_S", 0.0)
    cache = ServerCache("vllm", absent)
    cache.forget()
    (first,) = cache.fields.values()
    cache.forget()
    assert cache.fields.keys() == {"cache_salt"}
    assert cache.fields["cache_salt"] != first
    busy = ServerCache("vllm", lambda path: absent(path) if path == "/flush_cache" else '{"success": false}')
    busy.forget()
    assert (busy.fields, busy.state) == ({}, "NOT EMPTIED: /reset_prefix_cache answered success=false")
