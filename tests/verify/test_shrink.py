from __future__ import annotations

from flashgen.verify import Case, Mode, Trial, shrunk

LARGE = Trial(
    Case(
        "drawn",
        150,
        197,
        batch=2,
        heads=6,
        heads_kv=2,
        fill="huge",
        scale=0.01,
        layouts=("reversed", "unaligned", "one-batch", "wide-rows"),
        non_finite="keys",
        seed=9,
        dlse=True,
    ),
    Mode("random", 77, race=True, guard="begin"),
)


def test_what_always_fails_shrinks_to_one_query_and_one_key_and_keeps_watching_for_races():
    assert shrunk(LARGE, lambda trial: True) == Trial(Case("drawn", 1, 1), Mode(race=True))


def test_what_never_fails_again_stays():
    assert shrunk(LARGE, lambda trial: False) == LARGE


def test_only_what_the_failure_needs_is_left():
    def fails(trial):
        case, mode = trial.case, trial.mode
        odd = case.len_kv >= 65 and case.heads > case.heads_kv and case.layouts[1] == "unaligned"
        return odd and mode.schedule == "random"

    found = shrunk(LARGE, fails)
    assert (found.case.len_q, found.case.len_kv) == (1, 65)
    assert found.case.heads // found.case.heads_kv == 3
    assert found.case.heads_kv == found.case.batch == 1
    assert found.case.layouts == ("contiguous", "unaligned", "contiguous", "contiguous")
    assert (found.case.fill, found.case.non_finite, found.case.scale, found.case.seed) == ("normal", "nothing", None, 0)
    assert found.mode == Mode("random", 77, race=True)


def test_sequences_strides_and_the_gradient_of_lse_stay_where_the_failure_needs_them():
    huge = Trial(Case("drawn", 30, 20, batch=4, heads=4, heads_kv=2, layouts=("huge-head-stride",) * 4, dlse=True))

    def fails(trial):
        case = trial.case
        return case.batch > 2 and case.heads_kv > 1 and case.layouts[1] == "huge-head-stride" and case.dlse

    plain = "contiguous"
    smallest = Case(
        "drawn", 1, 1, batch=3, heads=2, heads_kv=2, layouts=(plain, "huge-head-stride", plain, plain), dlse=True
    )
    assert shrunk(huge, fails) == Trial(smallest)


def test_long_cases_shrink_within_the_trials_there_are():
    found = shrunk(Trial(Case("drawn", 40, 2100)), lambda trial: trial.case.len_kv > 2048)
    assert found == Trial(Case("drawn", 1, 2049))


def test_lengths_that_depend_on_each_other_shrink_as_far_as_single_steps_go():
    found = shrunk(LARGE, lambda trial: trial.case.len_q + trial.case.len_kv >= 100)
    assert found.case.len_q + found.case.len_kv == 100


def test_the_search_ends_and_is_the_same_each_time():
    tried = []

    def fails(trial):
        tried.append(trial)
        return len(tried) % 3 == 0

    first = shrunk(LARGE, fails, most_trials=40)
    assert len(tried) <= 40
    again, tried[:] = list(tried), []
    assert shrunk(LARGE, fails, most_trials=40) == first
    assert tried == again


def test_no_trial_is_run_twice():
    tried = []

    def fails(trial):
        tried.append(trial)
        return trial.case.len_q > 20

    shrunk(LARGE, fails)
    assert len(tried) == len(set(tried))
    assert LARGE not in tried
