import itertools

import pytest

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
