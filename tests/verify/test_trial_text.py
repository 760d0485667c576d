from __future__ import annotations

import pytest

from flashgen.errors import SpecError
from flashgen.spec import AttentionSpec, causal
from flashgen.verify import Case, Mode, Tiles, Trial, draw, modes, parse_trial, trial_text


def test_the_text_of_a_trial_is_short_where_it_is_plain():
    assert trial_text(Trial(Case("drawn", 1, 65))) == "Sq=1 Sk=65"
    case = Case(
        "drawn",
        37,
        53,
        batch=2,
        heads=6,
        heads_kv=2,
        fill="huge",
        scale=0.01,
        layouts=("contiguous", "wide-rows", "contiguous", "reversed"),
        non_finite="keys",
        seed=7,
        p=0.1,
        dlse=True,
    )
    trial = Trial(case, Mode("random", 5, True, "begin"))
    text = "Sq=37 Sk=53 B=2 H=6/2 fill=huge scale=0.01 k=wide-rows do=reversed non-finite=keys seed=7 p=0.1 dlse"
    assert trial_text(trial) == f"{text} schedule=random:5 guard=begin race"
    assert parse_trial(trial_text(trial)) == trial


def test_every_drawn_trial_comes_back_from_its_text():
    spec = AttentionSpec(64, mask=causal(), dropout=True)
    for index in range(300):
        case = draw(spec, Tiles(), 3, index)
        for mode in modes(3, index, schedules=5, race=index % 2 == 0):
            assert parse_trial(trial_text(Trial(case, mode))) == Trial(case, mode)


def test_the_order_of_words_does_not_matter():
    assert parse_trial("race H=4/2 Sk=2 Sq=1") == parse_trial("Sq=1  Sk=2 H=4/2 race")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "names no Sq"),
        ("Sq=1", "names no Sk"),
        ("Sq=1 Sk=2 Sq=3", "names 'Sq' twice"),
        ("Sq=1 Sk=2 race race", "names 'race' twice"),
        ("Sq=1 Sk=2 race=1", "the word 'race=1'"),
        ("Sq=1 Sk=2 dlse=0.5", "the word 'dlse=0.5'"),
        ("Sq=1 Sk=2 dlse dlse", "names 'dlse' twice"),
        ("Sq=1 Sk=2 fast", "the word 'fast'"),
        ("Sq=1 Sk=2 colour=red", "unknown word 'colour'; it knows Sq, Sk, B"),
        ("Sq=-1 Sk=2", "Sq=-1, which is not a whole number from 0"),
        ("Sq=+1 Sk=2", "Sq=+1"),
        ("Sq=1_0 Sk=2", "Sq=1_0"),
        ("Sq=1e3 Sk=2", "Sq=1e3"),
        ("Sq=٣ Sk=2", "Sq=٣"),
        ("Sq= Sk=2", "Sq=, which is not"),
        ("Sq=1 Sk=2 p=1.0", "p=1.0, which is not a probability from 0 to below 1"),
        ("Sq=99999999999 Sk=2", "from 0 to 65536"),
        ("Sq=1 Sk=2 B=two", "B=two"),
        ("Sq=1 Sk=2 H=4", "H=4, which is not HEADS/KV_HEADS"),
        ("Sq=1 Sk=2 H=4/3", "a number of heads and a divisor of it"),
        ("Sq=1 Sk=2 H=4/0", "a number of heads and a divisor of it"),
        ("Sq=1 Sk=2 H=4/2/1", "HEADS/KV_HEADS"),
        ("Sq=1 Sk=2 fill=odd", "fill=odd, which is not one of normal, spread"),
        ("Sq=1 Sk=2 q=upside-down", "which is not one of contiguous, heads-first"),
        ("Sq=1 Sk=2 non-finite=all", "one of nothing, keys, queries"),
        ("Sq=1 Sk=2 scale=0", "scale=0, which is not a number above 0"),
        ("Sq=1 Sk=2 scale=nan", "scale=nan"),
        ("Sq=1 Sk=2 scale=-1.0", "scale=-1.0"),
        ("Sq=1 Sk=2 scale=1e999", "scale=1e999"),
        ("Sq=1 Sk=2 scale=1.2.3", "scale=1.2.3"),
        ("Sq=1 Sk=2 seed=1.5", "seed=1.5"),
        ("Sq=1 Sk=2 schedule=eager", "one of sequential, reverse, random, priority"),
        ("Sq=1 Sk=2 schedule=random:", "such as random:7"),
        ("Sq=1 Sk=2 schedule=random:x", "such as random:7"),
        ("Sq=1 Sk=2 guard=both", "one of end, begin"),
    ],
)
def test_anything_else_is_refused_with_a_sentence(text, complaint):
    with pytest.raises(SpecError) as caught:
        parse_trial(text)
    assert complaint in str(caught.value)


def test_everything_wrong_is_said_at_once():
    with pytest.raises(SpecError) as caught:
        parse_trial("Sq=x B=y colour=red")
    assert len(caught.value.violations) == 4
