from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.cpus import cpus_text, is_choice, parse_cpus, share_of

CPUS = st.frozensets(st.integers(0, 9999), min_size=1, max_size=40)


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("0", {0}),
        ("0-3,8", {0, 1, 2, 3, 8}),
        (" 8 , 0-1,1-2 ", {0, 1, 2, 8}),
        ("1 3-4", {1, 3, 4}),
        ("5-5", {5}),
    ],
)
def test_a_list_is_numbers_and_ranges(text: str, cpus: set[int]) -> None:
    assert parse_cpus(text) == cpus
    assert is_choice(text)


@pytest.mark.parametrize(
    "text", ["", " ", ",", "0,", ",0", "0,,1", "3-0", "0-", "-1", "0-3:2", "a", "0x1", "12345", "²"]
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^.*$"):
        parse_cpus(text)
    assert not is_choice(text)


@given(CPUS)
def test_a_list_is_read_as_it_was_written(cpus: frozenset[int]) -> None:
    assert parse_cpus(cpus_text(cpus)) == cpus


def test_lists_are_written_short() -> None:
    assert cpus_text({8, 3, 2, 1, 0, 10, 11}) == "0-3,8,10-11"


@given(CPUS, st.integers(2, 50))
def test_shares_are_contiguous_cover_all_cpus_and_are_even(
    cpus: frozenset[int], workers: int
) -> None:
    shares = [sorted(share_of(cpus, index, workers, 1)) for index in range(workers)]
    if workers > len(cpus):
        assert not any(shares)
    else:
        assert [cpu for share in shares for cpu in share] == sorted(cpus)
        sizes = [len(share) for share in shares]
        assert max(sizes) - min(sizes) <= 1


def test_whoever_is_alone_or_has_more_threads_than_cpus_is_not_bound() -> None:
    assert share_of({0, 1}, 0, 1, 1) == frozenset()
    assert share_of(range(5), 0, 2, 3) == frozenset()
    assert share_of(range(5), 1, 2, 3) == {2, 3, 4}
    assert share_of((), 0, 2, 1) == frozenset()


def test_one_more_worker_shares_with_another() -> None:
    assert share_of({4, 5, 7}, 4, 3, 1) == share_of({4, 5, 7}, 1, 3, 1) == {5}
