from __future__ import annotations

import json
import os
import signal
import sys
from random import Random

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashgen.errors import SpecError
from flashgen.spec import AttentionSpec, BackwardSchedule, Schedule, WarpPartition, causal, full, window
from flashgen.spec.text.files import (
    dump_spec,
    load_spec,
    schedule_to_dict,
    spec_from_json,
    spec_from_toml,
    spec_to_json,
    spec_to_toml,
)
from flashgen.spec.text.parsing import parse_toml
from flashgen.spec.text.reading import schedule_from_dict, spec_from_dict

limits = st.none() | st.integers(0, 2**63 - 1)
windows = st.builds(window, limits, limits, align=st.sampled_from(["bottom-right", "top-left"]))
specs = (
    st.builds(
        AttentionSpec,
        st.integers(1, 256),
        head_dim_v=st.integers(1, 256),
        dtype=st.sampled_from(["fp16", "bf16", "fp32"]),
        mask=st.one_of(st.just(full()), st.just(causal()), windows, st.builds(lambda a, b: a & b, windows, windows)),
        direction=st.sampled_from(["forward", "both"]),
        deterministic=st.booleans(),
        dropout=st.booleans(),
        varlen=st.booleans(),
    )
    | st.builds(
        AttentionSpec,
        st.integers(1, 256),
        direction=st.just("forward"),
        cache=st.sampled_from(["contiguous", "paged"]),
    )
    | st.builds(
        AttentionSpec,
        st.integers(1, 64).map(lambda n: 4 * n),
        direction=st.just("forward"),
        cache=st.just("paged"),
        dtype=st.sampled_from(["bf16", "e4m3"]),
        cache_dtype=st.sampled_from(["e4m3", "e5m2"]),
        page_scales=st.booleans(),
    )
    | st.builds(
        AttentionSpec,
        st.integers(1, 4).map(lambda n: 16 * n),
        head_dim_v=st.integers(1, 8).map(lambda n: 64 * n),
        direction=st.just("forward"),
        cache=st.sampled_from(["contiguous", "paged"]),
        qv=st.just(True),
    )
    | st.builds(
        AttentionSpec,
        st.integers(1, 16).map(lambda n: 16 * n),
        dtype=st.just("e4m3"),
        direction=st.just("forward"),
        out_dtype=st.sampled_from([None, "bf16", "fp16"]),
        scale_block=st.sampled_from([None, 64, 128]),
        varlen=st.booleans(),
    )
)
tiles = st.none() | st.integers(1, 16).map(lambda n: 16 * n)
stages = st.none() | st.integers(1, 4)
counts = st.sampled_from([1, 2, 4, 8, 16])
backward = st.builds(BackwardSchedule, tiles, tiles, stages, st.none() | counts)
schedules = st.builds(
    Schedule,
    tiles,
    tiles,
    stages,
    st.none() | st.builds(WarpPartition, st.sampled_from(["split_q", "split_k"]), counts),
    backward,
    st.none() | st.just("fa2"),
) | st.builds(
    Schedule,
    tiles,
    tiles,
    stages,
    st.none() | st.builds(WarpPartition, st.just("specialized"), consumers=st.integers(1, 3)),
    backward,
    st.none() | st.just("fa3"),
    st.sampled_from([None, "reference-max", "running-max"]),
    st.none() | st.tuples(st.integers(3, 30), st.integers(3, 30)).map(lambda n: (8 * n[0], 8 * n[1])),
)
NAMES = (
    *(
        "head_dim",
        "head_dim_v",
        "dtype",
        "mask",
        "direction",
        "deterministic",
        "schedule",
        "tile_q",
        "tile_kv",
    ),
    *("algorithm", "softmax", "registers", "producers", "consumers"),
    *("stages", "warps", "backward", "kind", "count", "left", "right", "align", "tile", "", "\n", "x" * 5000),
)
LEAVES = (
    *(
        None,
        True,
        False,
        0,
        -1,
        -2,
        1,
        4,
        16,
        64,
        257,
        2**63,
        10**5000,
        1.5,
        float("nan"),
        "",
        "causal",
        "full",
    ),
    *("specialized", "fa3", "reference-max"),
    *("bf16", "both", "forward", "split_q", "top-left", "\x00", "y" * 5000),
)


def hostile(random, depth=0):
    """A value such as a parser might give: mostly near a right one."""
    kind = random.random()
    if depth < 3 and kind < 0.35:
        return {random.choice(NAMES): hostile(random, depth + 1) for _ in range(random.randrange(4))}
    if depth < 3 and kind < 0.5:
        return [hostile(random, depth + 1) for _ in range(random.randrange(4))]
    return random.choice(LEAVES)


@given(specs)
def test_json_and_toml_round_trip_to_the_same_spec_and_bytes(spec):
    for write, read in ((spec_to_json, spec_from_json), (spec_to_toml, spec_from_toml)):
        text = write(spec)
        again = read(text)
        assert again == spec
        assert hash(again) == hash(spec)
        assert write(again) == text


@given(schedules)
def test_schedules_round_trip(schedule):
    plain = schedule_to_dict(schedule)
    assert schedule_from_dict(plain) == schedule
    assert json.loads(json.dumps(plain)) == plain


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(specs, schedules)
def test_files_round_trip(tmp_path, spec, schedule):
    for name in ("spec.toml", "spec.json"):
        dump_spec(spec, schedule, tmp_path / name)
        assert load_spec(tmp_path / name) == (spec, schedule)


@pytest.mark.parametrize("read", [spec_from_dict, schedule_from_dict])
def test_any_values_are_a_spec_or_a_spec_error(read):
    random = Random(0)
    for _ in range(5000):
        values = {random.choice(NAMES): hostile(random) for _ in range(random.randrange(5))}
        try:
            read(values)
        except SpecError as error:
            remedies = [violation.partition("; ")[2] for violation in error.violations]
            length = max(map(len, error.violations))
        else:
            remedies, length = ["none needed"], 0
        assert remedies
        assert all(remedies), values
        assert length < 1000


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=40) | st.text(max_size=40).map(str.encode))
def test_any_bytes_are_a_spec_or_a_spec_error(tmp_path_factory, data):
    folder = tmp_path_factory.getbasetemp()
    for name in ("any.toml", "any.json"):
        (folder / name).write_bytes(data)
        with pytest.raises(SpecError):
            load_spec(folder / name)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "head_dim = " + "[" * 100_000, "head_dim = 0x" + "f" * 5000, "1" * 5000]
)
def test_texts_that_exhaust_a_parser_are_spec_errors(text):
    for read in (spec_from_json, spec_from_toml):
        with pytest.raises(SpecError):
            read(text)


def test_a_file_reads_as_documented(tmp_path):
    path = tmp_path / "spec.toml"
    path.write_text(
        'head_dim = 128\ndtype = "float16"\nmask = ["causal", {left = 512, align = "top-left"}]\n'
        "[schedule]\ntile_q = 128\n[schedule.warps]\nkind = 'split_k'\ncount = 8\n"
        "[schedule.backward]\ntile_kv = 64\n"
    )
    spec, schedule = load_spec(path)
    assert spec == AttentionSpec(128, dtype="fp16", mask=causal() & window(512, align="top-left"))
    assert schedule == Schedule(tile_q=128, warps=WarpPartition("split_k", 8), backward=BackwardSchedule(tile_kv=64))


def test_the_written_form_is_small_and_fixed():
    spec = AttentionSpec(64, mask=window(512, 0))
    assert spec_to_toml(spec, Schedule(tile_q=64, warps=WarpPartition("split_q", 4))) == (
        'head_dim = 64\nhead_dim_v = 64\ndtype = "bf16"\nmask = {left = 512, right = 0}\n'
        'direction = "both"\ndeterministic = false\n\n[schedule]\ntile_q = 64\n\n'
        '[schedule.warps]\nkind = "split_q"\ncount = 4\n'
    )
    assert spec_to_json(AttentionSpec(64, mask=causal())) == (
        '{"head_dim":64,"head_dim_v":64,"dtype":"bf16","mask":"causal","direction":"both","deterministic":false}'
    )


def test_a_schedule_for_hopper_is_read_and_written(tmp_path):
    path = tmp_path / "spec.toml"
    partition = WarpPartition("specialized", producers=1, consumers=2)
    schedule = Schedule(warps=partition, algorithm="fa3", softmax="running-max", registers=(40, 232))
    dump_spec(AttentionSpec(128), schedule, path)
    assert path.read_text().partition("[schedule]\n")[2] == (
        'algorithm = "fa3"\nsoftmax = "running-max"\nregisters = [40, 232]\n\n'
        '[schedule.warps]\nkind = "specialized"\nproducers = 1\nconsumers = 2\n'
    )
    path.write_text('head_dim = 128\n[schedule.warps]\nkind = "specialized"\nconsumers = 3\n')
    assert load_spec(path)[1] == Schedule(warps=WarpPartition("specialized", consumers=3))


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"registers": [40]}, "schedule registers=(40,) cannot be given to warpgroups; use two multiples of 8"),
        ({"registers": "40,232"}, "schedule registers='40,232' cannot be given to warpgroups"),
        ({"algorithm": 3}, "schedule algorithm=3 is unknown; use one of standard, naive, fa1"),
        ({"warps": {"consumers": 2}}, 'kind is missing; write {kind = "split_q", count = 4} or {kind ='),
        ({"warps": {"kind": "specialized", "consumers": 9}}, "consumers=9 is not supported; use 1, 2 or 3"),
        ({"warps": {"kind": "split_q", "consumers": 2}}, "consumers=2 belongs to kind='specialized'"),
    ],
)
def test_what_is_wrong_with_a_schedule_for_hopper_is_said(values, part):
    with pytest.raises(SpecError) as caught:
        schedule_from_dict(values)
    assert any(part in violation for violation in caught.value.violations), caught.value.violations


def test_every_violation_of_a_file_is_listed_with_its_path(tmp_path):
    path = tmp_path / "bad.json"
    path.write_text(
        json.dumps(
            {
                "head_dims": 64,
                "dtype": "int4",
                "mask": [{"left": -7}, {"rigth": 1}, "casual"],
                "deterministic": None,
                "schedule": {"tile_q": 17, "warps": {"kind": "split_z"}, "backward": {"warps": 3}, "x": 1},
            }
        )
    )
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    assert all(v.startswith(f"{path}: ") for v in caught.value.violations)
    listed = "\n".join(caught.value.violations)
    for part in (
        "head_dims=64 is not a field; did you mean head_dim?",
        "head_dim is missing",
        "dtype='int4'",
        "mask[0]: window left=-7",
        "mask[1].rigth=1 is not a field; did you mean right?",
        "mask[2]='casual' is not a mask",
        "deterministic=null",
        "schedule tile_q=17",
        "schedule.warps: warp partition kind='split_z'",
        "schedule backward warps=3",
        "schedule.x=1 is not a field",
    ):
        assert part in listed
    assert len(caught.value.violations) == 11


def test_files_that_cannot_be_read_are_spec_errors(tmp_path):
    with pytest.raises(SpecError, match="cannot be read"):
        load_spec(tmp_path / "missing.toml")
    with pytest.raises(SpecError, match=r"\.yaml"):
        load_spec(tmp_path / "spec.yaml")
    with pytest.raises(SpecError, match="suffix"):
        dump_spec(AttentionSpec(64), None, tmp_path / "spec")
    (tmp_path / "latin.toml").write_bytes(b"dtype = '\xff'")
    with pytest.raises(SpecError, match="UTF-8"):
        load_spec(tmp_path / "latin.toml")


def test_a_schedule_is_not_a_field_of_a_spec_alone():
    with pytest.raises(SpecError, match="load_spec"):
        spec_from_json('{"head_dim": 64, "schedule": {}}')


def test_importing_the_readers_loads_no_parser():
    import subprocess

    code = (
        "import sys, flashgen.spec.text.files; print([m for m in ('msgspec', 'tomllib', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.fixture
def quickly():
    """Ten seconds, after which the test ends with what hangs in its traceback."""

    def stop(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(10)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.skipif(os.name != "posix", reason="FIFOs and devices")
@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_only_regular_files_are_read(tmp_path, quickly, suffix):
    path = tmp_path / f"fifo{suffix}"
    os.mkfifo(path)
    (tmp_path / f"device{suffix}").symlink_to("/dev/zero")
    (tmp_path / f"folder{suffix}").mkdir()
    for name in ("fifo", "device", "folder"):
        with pytest.raises(SpecError, match=rf"{name}\{suffix} cannot be read \(it is not a regular file\); name a "):
            load_spec(tmp_path / f"{name}{suffix}")


def test_files_of_more_than_a_mebibyte_are_refused_unread(tmp_path, quickly):
    for suffix in (".toml", ".json"):
        path = tmp_path / f"large{suffix}"
        with path.open("wb") as file:
            file.truncate(2**40)
        with pytest.raises(SpecError, match="has more than 1048576 bytes"):
            load_spec(path)
    for read in (spec_from_json, spec_from_toml):
        with pytest.raises(SpecError, match="has more than 1048576 characters"):
            read(" " * 2**20 + "1")


UNKNOWN = [f"k{number}" for number in range(70_000)]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("unknown.json", json.dumps(dict.fromkeys(UNKNOWN, 1))),
        ("unknown.toml", "\n".join(f"{name} = 1" for name in UNKNOWN)),
        ("captured.json", json.dumps({"head_dim": 64, "captured": dict.fromkeys(UNKNOWN, "x")})),
        ("unused.json", json.dumps({"head_dim": 64, "captured": dict.fromkeys(UNKNOWN, 1)})),
        ("schedule.json", json.dumps({"head_dim": 64, "schedule": dict.fromkeys(UNKNOWN, 1)})),
        ("masks.json", json.dumps({"head_dim": 64, "mask": [{"x": 1}] * 60})),
    ],
)
def test_many_errors_are_found_quickly_and_listed_in_part(tmp_path, quickly, name, text):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    assert len(caught.value.violations) == 21
    assert caught.value.violations[-1] == f"{path}: there are more errors; correct these first"
    assert len(str(caught.value)) < 10_000


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("deep.toml", ".".join(["a"] * 100_000) + " = 1", "the key a.a.a.a"),
        ("inline.toml", "x = {a" + ' . "b"' * 100_000 + " = 1}", "has more than 16 parts"),
        ("table.toml", f"[{'.'.join(['a'] * 100_000)}]", "has more than 16 parts"),
        ("behind_a_string.toml", f's = """x"""\n# {"b." * 20}\n{"a." * 100_000}a = 1', "the key a.a.a.a"),
        ("open.toml", 's = """' + '\\"""' * 200_000, "is not TOML"),
        ("escapes.toml", 's = "' + '\\"' * 400_000, "is not TOML"),
        ("words.toml", "a" * 500_000 + " " * 500_000, "is not TOML"),
        ("quotes.toml", "\"'" * 500_000, "is not TOML"),
        ("masks.toml", "head_dim = 64\nmask = [" + "{where = 'q > k'}, " * 50_000 + "]", "mask has 50000 parts"),
        ("nested.json", '{"a":' * 150_000, "is not JSON"),
    ],
)
def test_files_made_to_take_long_are_refused_quickly(tmp_path, quickly, name, text, message):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(SpecError, match=message):
        load_spec(path)


@pytest.mark.parametrize("dots", [".".join(["0"] * 17), ".".join(["a"] * 40), "a . b" * 40, "a, b. " * 100, "." * 100])
@pytest.mark.parametrize(
    "text",
    [
        "# {}",
        'a = 1 # "{}"',
        "a = 'b' # '{}",
        '"{}".a = 30.0',
        "a = {{b.'{}' = 30.0}}",
        "['{}']",
        'a = "{}"',
        "a = '{}'",
        'a = """\n{}\\"""\n{}"""\nb = 1',
        "a = '''{}''{}\n'''\nb = 1",
    ],
)
def test_dots_in_strings_and_comments_are_no_deep_keys(text, dots):
    text = text.format(dots, dots)
    assert parse_toml(text) == msgspec.toml.decode(text)


@pytest.mark.parametrize(
    "text", ['{"head_dim": 64, "head_dim": 32}', '{"head_dim": 64, "mask": {"left": 1, "left": 2}}']
)
def test_duplicate_keys_are_refused_in_json_as_in_toml(text):
    with pytest.raises(SpecError, match=r"the key '\w+' is given twice in one JSON object; keep one of them"):
        spec_from_json(text)
    with pytest.raises(SpecError, match="not TOML"):
        spec_from_toml("head_dim = 64\nhead_dim = 32")


def test_names_that_cannot_be_printed_are_quoted():
    with pytest.raises(SpecError) as caught:
        spec_from_json('{"head_dim": 64, "a\\nb\\u001b[31m": 1}')
    assert str(caught.value).startswith("'a\\nb\\x1b[31m'=1 is not a field")
