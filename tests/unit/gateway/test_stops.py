import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.stops import StopMatcher


def run(stops, pieces, **options):
    matcher = StopMatcher(stops, **options)
    shown = []
    for piece in pieces:
        shown.append(matcher.feed(piece))
        if matcher.matched is not None:
            return "".join(shown), matcher.matched
    return "".join(shown) + matcher.flush(), None


def cuts(text):
    """Every way to cut ``text`` into pieces."""
    for size in range(len(text)):
        for borders in itertools.combinations(range(1, len(text)), size):
            edges = (0, *borders, len(text))
            yield [text[a:b] for a, b in itertools.pairwise(edges)]


@pytest.mark.parametrize(
    ("stops", "text", "shown", "matched"),
    [
        (["END"], "helloEND", "hello", "END"),
        (["END"], "helENEND", "helEN", "END"),
        (["aab"], "aaaab", "aa", "aab"),
        (["abcd", "bc"], "xabcd", "xa", "bc"),
        (["bc", "abc"], "xabcx", "x", "abc"),
        (["zz"], "plain z", "plain z", None),
        (["\n\n"], "a\nb\n\nc", "a\nb", "\n\n"),
    ],
)
def test_result_is_the_same_wherever_the_text_is_cut(stops, text, shown, matched):
    for pieces in cuts(text):
        assert run(stops, pieces) == (shown, matched), pieces


def test_only_what_may_begin_a_stop_string_is_held_back():
    matcher = StopMatcher(["STOP"])
    assert matcher.feed("say ST") == "say "
    assert matcher.feed("ART") == "START"
    assert matcher.feed("S") == ""
    assert matcher.flush() == "S"


def test_the_stop_string_itself_is_shown_on_request():
    assert run(["END"], ["abcE", "NDx"], include=True) == ("abcEND", "END")


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    st.lists(st.text("abc", max_size=4), max_size=12),
    st.booleans(),
)
def test_the_stop_string_that_is_whole_first_is_found(stops, pieces, include):
    text = "".join(pieces)
    ends = [(start + len(stop), start, stop) for stop in stops if (start := text.find(stop)) >= 0]
    if ends:
        end, start, stop = min(ends)
        assert run(stops, pieces, include=include) == (text[: end if include else start], stop)
    else:
        assert run(stops, pieces, include=include) == (text, None)


def test_the_work_does_not_grow_with_what_is_held_back():
    """16 long stop strings that all but match: a bounded number of steps a character."""
    steps = 0

    class Text(str):
        __slots__ = ()

        def __getitem__(self, index):
            nonlocal steps
            steps += 1
            return super().__getitem__(index)

    matcher = StopMatcher([Text("a" * (1000 + i) + "b") for i in range(16)])
    steps = 0
    for _ in range(2000):
        assert matcher.matched is None
        matcher.feed("a")
    assert steps <= 4 * 16 * 2000
