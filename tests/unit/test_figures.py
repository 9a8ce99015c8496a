"""Test how the command line prints numbers and names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from deltawire.cli.output import figures
from deltawire.cli.output.tables import lay_out_table


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (9_994, "9.99 kB"),
        (9_996, "10.0 kB"),
        (99_960, "100 kB"),
        (999_499, "999 kB"),
        (999_500, "1.00 MB"),
    ],
)
def test_sizes_have_three_digits(count: int, text: str) -> None:
    assert figures.size(count) == text


@given(st.integers(0, 10**17))
def test_short_counts_fit_five_characters(count: int) -> None:
    assert len(figures.short_count(count)) <= 5


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [
        (0, 5, "0"),
        (0, 0, "0"),
        (5, 5, "100"),
        (1, 10**9, "<.001"),
        (10**6 - 1, 10**6, ">99.9"),
        (1, 300, "0.333"),
        (1, 30, "3.33"),
        (1, 3, "33.3"),
    ],
)
def test_a_share_is_zero_or_hundred_only_if_it_is(part: int, whole: int, text: str) -> None:
    assert figures.percent(part, whole) == text


def test_a_quotient_by_nothing_is_a_dash() -> None:
    assert figures.ratio(1, 0, " bits") == "–"
    assert figures.ratio(12_345, 1, "×") == "12,345×"
    assert figures.bits_per_change(1, 0) is None


@given(st.text(), st.integers(1, 40))
def test_names_are_wrapped_and_never_cut(name: str, width: int) -> None:
    lines = figures.wrap_name(name, width)
    assert "".join([lines[0], *(line.removeprefix("  ") for line in lines[1:])]) == name
    assert all(cell_len(line) <= width or line.strip().strip(".").count(".") == 0 for line in lines)


@given(st.text("ab 世", max_size=60), st.integers(1, 40), st.integers(0, 6))
def test_texts_break_between_words_only(text: str, width: int, indent: int) -> None:
    lines = figures.wrap_words(text, width, indent=indent)
    assert [word for line in lines for word in line.split()] == text.split()
    assert all(cell_len(line) <= width or len(line.split()) <= 1 for line in lines)


def test_a_table_does_without_columns_that_do_not_fit() -> None:
    titles, rows = ("name", "size", "empty"), [("a", "1"), ("bcd", "22")]
    rows = [(*row, "") for row in rows]
    assert lay_out_table(titles, rows, width=80, left=("name",)) == ("name  size", ["a        1", "bcd     22"])
    assert lay_out_table(titles, rows, width=9, left=("name",), dropped_first=("size",)) == ("name", ["a", "bcd"])


def test_names_cannot_command_the_terminal() -> None:
    assert figures.printable("a\x1b[31mb\r\n") == "a\ufffd[31mb\ufffd\ufffd"


_chunks = st.lists(st.integers(1, 1000).flatmap(lambda elements: st.tuples(st.just(elements), st.integers(0, elements))), max_size=12)


@given(_chunks, st.integers(1, 20))
def test_slices_hold_all_changes_between_them(chunks: list[tuple[int, int]], slices: int) -> None:
    total = sum(elements for elements, _ in chunks)
    densities = figures.slice_densities(chunks, slices)
    assert len(densities) == slices
    assert all(0 <= density <= 1 for density in densities)
    assert sum(densities) * total / slices == pytest.approx(sum(changed for _, changed in chunks))


def test_the_bar_shows_where_changes_lie() -> None:
    assert figures.density_bar([(100, 0), (100, 50), (100, 100), (100, 1)], 4) == " ▅█▁"
    assert figures.density_bar([(100, 0)], 4) == "    "
    assert figures.density_bar([], 4) == "    "
