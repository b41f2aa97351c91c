import pytest

from gateway.output import Choice
from mesh.messages import Delta, Logprob

STORY = " He said: café 10 € and 😀!"


def make(tokenizer, **options):
    return Choice(0, tokenizer.detokenizer((), skip_special_tokens=True), **options)


def feed(choice, ids, *, finish="length", stop_token=-1, logprobs=False):
    """One delta a token; the pieces that come out."""
    pieces = []
    for i, id_ in enumerate(ids):
        last = i == len(ids) - 1
        delta = Delta(
            request="r",
            tokens=(id_,),
            logprobs=(Logprob(id_, -float(i)),) if logprobs else (),
            finish=finish if last else None,
            stop_token=stop_token if last else -1,
        )
        piece = choice.feed(delta)
        if piece is not None:
            pieces.append(piece)
        if choice.done:
            break
    return pieces


@pytest.fixture
def story(tokenizer):
    return tokenizer.encode(STORY, add_special_tokens=False)


def text(pieces):
    return "".join(piece.text for piece in pieces)


def test_pieces_add_up_and_the_last_says_why(tokenizer, story):
    choice = make(tokenizer)
    pieces = feed(choice, story, finish="stop", stop_token=1)
    assert text(pieces) == STORY
    assert [piece.finish for piece in pieces] == [None] * (len(pieces) - 1) + ["stop"]
    assert choice.tokens == len(story) + 1
    assert choice.done


def test_logprobs_come_with_the_text_of_their_token(tokenizer, story):
    pieces = feed(make(tokenizer, entries=True, offset=5), story, logprobs=True)
    entries = [entry for piece in pieces for entry in piece.entries]
    assert [entry.logprob.token for entry in entries] == story
    shown = 5
    for piece in pieces:
        assert all(shown <= entry.offset <= shown + len(piece.text) for entry in piece.entries)
        shown += len(piece.text)


def test_a_stop_string_ends_it_and_drops_the_tokens_behind(tokenizer, story):
    choice = make(tokenizer, stops=["é 10"], entries=True)
    pieces = feed(choice, story, logprobs=True)
    assert text(pieces) == " He said: caf"
    assert choice.stopped
    assert pieces[-1].finish == "stop"
    entries = [entry for piece in pieces for entry in piece.entries]
    assert all(entry.offset < len(" He said: caf") for entry in entries)
    kept = [entry.logprob.token for entry in entries]
    assert kept == story[: len(kept)]


def test_stop_strings_do_not_count_before_min_tokens(tokenizer, story):
    choice = make(tokenizer, stops=[" He", "and"], min_tokens=3)
    assert text(feed(choice, story)) == " He said: café 10 € "


def test_held_back_text_is_shown_at_the_end(tokenizer, story):
    choice = make(tokenizer, stops=["!?"])
    assert text(feed(choice, story)) == STORY
    assert not choice.stopped


def test_an_end_without_text_still_makes_a_piece(tokenizer):
    choice = make(tokenizer)
    piece = choice.feed(Delta(request="r", finish="stop", stop_token=1))
    assert (piece.text, piece.finish, choice.tokens) == ("", "stop", 1)


def test_an_end_without_tokens_keeps_the_prompts_scores(tokenizer):
    choice = make(tokenizer, entries=True)
    scores = (None, Logprob(3, -1.0))
    piece = choice.feed(Delta(request="r", prompt_logprobs=scores, finish="length"))
    assert (piece.text, list(piece.entries), piece.finish) == ("", [], "length")
    assert choice.tokens == 0
    assert choice.prompt_logprobs == scores


def test_a_stop_token_has_no_log_probability_of_its_own(tokenizer):
    choice = make(tokenizer, entries=True)
    piece = choice.feed(
        Delta(request="r", logprobs=(Logprob(1, -1.0),), finish="stop", stop_token=1)
    )
    assert list(piece.entries) == []
