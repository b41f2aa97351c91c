import pytest

from gateway.api import logprobs as shapes
from gateway.output import Entry
from mesh.messages import Logprob


class Names:
    """Tokens 0 to 9 spell letters; 3 and 4 spell the same."""

    def token_text(self, id_):
        return "abcddefghi"[id_]

    def token_bytes(self, id_):
        return self.token_text(id_).encode()


def entry(token, value, *top):
    return Entry(Logprob(token, value, top), 0)


def test_the_token_itself_is_always_in_the_dict():
    found = shapes.legacy([entry(5, -3.5, (1, -0.1), (2, -0.2))], Names(), 1)
    assert found.top_logprobs == [{"b": -0.1, "e": -3.5}]


def test_a_greedy_token_equals_the_largest_value_exactly():
    value = -0.1234567
    found = shapes.legacy([entry(1, value, (1, value), (2, -2.0))], Names(), 2)
    assert found.token_logprobs[0] == max(found.top_logprobs[0].values())


def test_tokens_that_spell_the_same_do_not_make_each_other_greedy():
    found = shapes.legacy([entry(4, -2.0, (3, -0.5))], Names(), 1)
    assert found.token_logprobs[0] < max(found.top_logprobs[0].values())


def test_minus_infinity_becomes_a_number():
    assert shapes.legacy([entry(1, float("-inf"))], Names(), 0).token_logprobs == [-9999.0]


def test_chat_lists_only_what_was_asked_for():
    (found,) = shapes.chat([entry(5, -3.5, (1, -0.1), (2, -0.2))], Names(), 1)
    assert (found.token, found.bytes) == ("e", [101])
    assert [top.token for top in found.top_logprobs] == ["b"]


def test_a_prompts_first_token_has_no_probability(tokenizer):
    ids = tokenizer.encode("Hello world", add_special_tokens=True)
    scores = [None, *(Logprob(id_, -1.0) for id_ in ids[1:])]
    text = "Hello world"
    found = shapes.legacy_prompt(ids, text, scores, tokenizer, 0, special_tokens_shown=False)
    assert found.token_logprobs[0] is None
    assert found.top_logprobs[0] is None
    assert found.text_offset[:2] == [0, 0]  # the begin token shows nothing
    assert "".join(found.tokens[1:]) == text
    text = "<|bos|>" + text
    shown = shapes.legacy_prompt(ids, text, scores, tokenizer, 0, special_tokens_shown=True)
    assert shown.text_offset[1] == len("<|bos|>")


@pytest.mark.parametrize(
    ("text", "offsets"),
    [
        ("hello world", [0, 2, 5]),
        (" world", [0, 0]),  # written as two spaces, the first of which is no text
    ],
)
def test_offsets_of_sentencepiece_count_in_the_echoed_text(sentencepiece, text, offsets):
    # Its first token spells a space that the text does not have.
    ids = {"hello world": [2, 3, 4], " world": [1, 4]}[text]
    scores = [None] * len(ids)
    found = shapes.legacy_prompt(ids, text, scores, sentencepiece, 0, special_tokens_shown=True)
    assert found.text_offset == offsets
    assert sentencepiece.decode(ids) == text
