"""Recipes: spellings, options and records."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from deltawire.format.records.record_parts import RecipeRecord
from deltawire.publish.quantising import record_of
from deltawire.quantise import Recipe
from deltawire.quantise.modules import ModulePatterns
from deltawire.quantise.published_recipe import published_recipe
from deltawire.quantise.recipe import RELEASES, SPELLINGS


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings_and_records_come_back(spelling):
    recipe = Recipe.parse(spelling)
    assert recipe.spelling == str(recipe) == spelling
    assert Recipe.of(spelling) == Recipe.of(recipe) == recipe
    assert recipe.release == RELEASES[recipe.name] == recipe.to_json()["release"]
    other = Recipe.parse(spelling, sticky=False, ignore=["a"])
    published = {"a.weight": np.zeros((1, 1), np.float32), "b.weight": np.zeros((1, 1), np.uint8)}
    assert published_recipe(record_of(other), published, published) == other != recipe


def test_only_sticky_may_change_without_a_new_anchor():
    recipe = Recipe.parse("fp8-block")
    assert recipe.makes_same_tensors(Recipe.parse("fp8-block", sticky=False))
    assert not recipe.makes_same_tensors(Recipe.parse("fp8-block-ue8m0"))
    assert not recipe.makes_same_tensors(Recipe.parse("fp8-block", ignore=[]))
    assert not recipe.makes_same_tensors(replace(recipe, release=7))
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
    ],
)
def test_wrong_recipes_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_the_patterns_of_a_chain_are_not_used():
    """A regular expression from a bucket could take for ever."""
    endless = RecipeRecord("nvfp4", 1, {"ignore": ["re:(a+)+$", "re:("], "sticky": True, "colour": 1})
    name = "a" * 60 + ".weight"
    assert published_recipe(endless, [name], {name: np.zeros((1, 1), np.float32)}).ignore == ("a" * 60,)
    for wrong in ({"group_size": "16"}, {"scale": "ue8m0"}):
        with pytest.raises(ValueError, match="nvfp4"):
            published_recipe(RecipeRecord("nvfp4", 1, wrong), [], {})


def test_a_version_shows_only_the_beginning_of_long_options():
    record = record_of(Recipe("fp8-block"))
    assert len(repr(record)) < 140
    assert repr(record).startswith("RecipeRecord(name='fp8-block', release=1, options={'ignore': ['")


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
