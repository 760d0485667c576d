from __future__ import annotations

import itertools

import pytest

from flashgen.cache import Cache, cache_key
from flashgen.errors import CacheError


def test_each_field_alone_changes_the_key(make_source):
    base = {
        "text": "kernel",
        "arch": "sm_90",
        "build": "CL-1 V13.4.59",
        "options": ("-a", "-b"),
        "output": "cubin",
    }
    changes = [
        {"text": "kernel "},
        {"text": "kerneL"},
        {"arch": "sm_90a"},
        {"build": "V13.4.92"},
        {"options": ("-b", "-a")},
        {"options": ("-a",)},
        {"options": ("-a", "-b", "")},
        {"options": ("-a-b",)},
        {"output": "ptx"},
    ]

    def key(text, arch, build, options, output):
        return cache_key(make_source(text, arch), build, options, output=output)

    keys = [key(**base), *(key(**{**base, **change}) for change in changes)]
    assert len(set(keys)) == len(keys)
    assert keys[0] == key(**base)


def test_moving_bytes_between_fields_changes_the_key(make_source):
    # All ways to cut "abcabc" into text, build id and one option; joined without lengths they would be equal.
    whole = "abcabc"
    keys = set()
    for i, j in itertools.combinations_with_replacement(range(len(whole) + 1), 2):
        keys.add(cache_key(make_source(whole[:i]), whole[i:j], (whole[j:],)))
    assert len(keys) == 28


def test_the_name_of_the_program_does_not_matter(make_source):
    assert cache_key(make_source(name="a"), "b", ()) == cache_key(make_source(name="b"), "b", ())


def test_a_list_of_options_is_as_good_as_a_tuple(make_source):
    assert cache_key(make_source(), "b", ["-x"]) == cache_key(make_source(), "b", ("-x",))


def test_a_hundred_thousand_sources_have_as_many_keys(make_source):
    source = make_source()
    keys = set()
    for i in range(100_000):
        source.code = f"tile_q = {i};"
        keys.add(cache_key(source, "build", ("--std=c++20",)))
    assert len(keys) == 100_000


@pytest.mark.parametrize(
    "key", ["", "ab", "../" + "a" * 61, "/" + "a" * 63, "A" * 64, "a" * 63 + "\n", "a" * 65, "a" * 63 + "\0"]
)
def test_what_is_no_key_never_becomes_a_path(cache: Cache, make_binary, key):
    for use in (cache.get, lambda k: cache.put(k, make_binary()), lambda k: cache.obtain(k, make_binary)):
        with pytest.raises(CacheError, match="not a cache key"):
            use(key)
    assert not cache.root.exists()
