"""Recipes: spellings, options and records."""

from __future__ import annotations

import pytest

from deltawire.publish.quantising import record_of
from deltawire.quantise import Recipe
from deltawire.quantise.modules import ModulePatterns
from deltawire.quantise.recipe import RELEASES, SPELLINGS


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings_and_records_come_back(spelling):
    recipe = Recipe.parse(spelling)
    assert recipe.spelling == str(recipe) == spelling
    assert Recipe.of(spelling) == Recipe.of(recipe) == recipe
    assert Recipe.from_json(recipe.to_json()) == recipe
    assert recipe.release == RELEASES[recipe.name] == recipe.to_json()["release"]
    other = Recipe.parse(spelling, sticky=False, ignore=["a", "re:b"])
    assert Recipe.from_json(other.to_json()) == other != recipe


def test_only_sticky_may_change_without_a_new_anchor():
    recipe = Recipe.parse("fp8-block")
    assert recipe.makes_same_tensors(Recipe.parse("fp8-block", sticky=False))
    assert not recipe.makes_same_tensors(Recipe.parse("fp8-block-ue8m0"))
    assert not recipe.makes_same_tensors(Recipe.parse("fp8-block", ignore=[]))
    assert not recipe.makes_same_tensors(Recipe.from_json({**recipe.to_json(), "release": 7}))
    assert not Recipe.parse("int4").makes_same_tensors(Recipe.parse("int4-128"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Recipe.parse("fp9"), "no recipe 'fp9'; choose one of fp8-block"),
        (lambda: Recipe("fp9"), "no recipe 'fp9'"),
        (lambda: Recipe("int4", group_size=64), "groups of 32 or 128, not groups of 64"),
        (lambda: Recipe("fp8-block", group_size=64), "no groups"),
        (lambda: Recipe("nvfp4", scale="ue8m0"), "does not have scales"),
        (lambda: Recipe("nvfp4", ignore="lm_head"), "sequence of patterns"),
        (lambda: Recipe("nvfp4", ignore=("re:(",)), "not a valid regular expression"),
        (lambda: Recipe("nvfp4", ignore=("re:a{99999999999999999999}",)), "not a valid regular expression"),
        (lambda: Recipe("nvfp4", ignore=("re:" + "(" * 3000 + ")" * 3000,)), "not a valid regular expression"),
        (lambda: Recipe.from_json({"name": "nvfp4"}), "release, sticky, ignore"),
        (lambda: Recipe.from_json({**Recipe("nvfp4").to_json(), "ignore": [1]}), "wrong or missing"),
        (lambda: Recipe.from_json({**Recipe("nvfp4").to_json(), "release": True}), "release"),
        (lambda: Recipe.from_json({**Recipe("nvfp4").to_json(), "colour": 1}), "colour"),
    ],
)
def test_wrong_recipes_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_each_pattern_is_an_expression_of_its_own():
    patterns = ModulePatterns(["re:(x)y$", r"re:(a|b)\1$", "re:(?i)HEAD$", "re:(?P<kind>gate)$", "re:(?P<kind>router)$"])
    assert [name for name in ("xy", "aa", "ax", "head", "gate", "router", "body") if patterns.match(name)] == [
        "xy",
        "aa",
        "head",
        "gate",
        "router",
    ]


def test_a_version_cannot_record_a_pattern_that_cannot_be_printed():
    with pytest.raises(ValueError, match="cannot be printed"):
        record_of(Recipe("nvfp4", ignore=("re:a\tb",)))
