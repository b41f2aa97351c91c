import functools
import json
import shutil
import sys
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Raw
from tokenizers import decoders, models, pre_tokenizers

from gateway.text import Tokenizer, TokenizerError
from tests.unit.gateway.scripted_mesh import MODEL

shipped_tokenizer = functools.cache(lambda: Tokenizer(MODEL))

TEXTS = [
    "Hello  world",
    " leading and trailing ",
    "naïve café — 10 €\n\n\ttabs",
    "😀👩‍👩‍👧‍👦 family",
    "日本語 and 한국어",
    "",
]


def stream(tokenizer, ids, prompt=(), *, skip=True):
    detokenizer = tokenizer.detokenizer(prompt, skip_special_tokens=skip)
    return [detokenizer.feed(id_) for id_ in ids] + [detokenizer.flush()]


def write(tmp_path, raw):
    raw.save(str(tmp_path / "tokenizer.json"))
    return Tokenizer(tmp_path)


@pytest.fixture(scope="module")
def wordpiece(tmp_path_factory):
    raw = Raw(models.WordPiece({"[UNK]": 0, "play": 1, "##ing": 2, "now": 3}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.decoder = decoders.WordPiece()
    return write(tmp_path_factory.mktemp("wp"), raw)


@pytest.mark.parametrize("text", TEXTS)
def test_streamed_text_is_the_whole_text(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert "".join(stream(tokenizer, ids)) == text


@pytest.mark.parametrize("text", TEXTS)
def test_no_piece_holds_half_a_character(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert not any("\ufffd" in piece for piece in stream(tokenizer, ids))


def test_a_long_text_has_the_tokens_of_its_parts(tokenizer):
    part = "Once upon a time, \u20ac.\n"
    ids = tokenizer.encode(part, add_special_tokens=False)
    long = part * 500
    assert tokenizer.takes_long(long)
    assert tokenizer.encode(long, add_special_tokens=False) == ids * 500
    assert tokenizer.decode(ids * 500) == long


@pytest.mark.parametrize("way", ["encode", "decode"])
def test_long_texts_let_other_threads_run(tokenizer, way):
    text = "Once upon a time, there was a lighthouse. " * 5_000
    ids = tokenizer.encode(text, add_special_tokens=False)
    ticks, seen, done = 0, [], threading.Event()

    def work():
        seen.append(ticks)
        if way == "encode":
            tokenizer.encode(text, add_special_tokens=False)
        else:
            tokenizer.decode(ids)
        seen.append(ticks)
        done.set()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)  # nobody is made to give way: only the tokenizer itself can
    try:
        thread = threading.Thread(target=work)
        thread.start()
        while thread.is_alive() and not done.is_set():
            ticks += 1
            time.sleep(0)
        thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert seen[1] > seen[0]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 3071), max_size=40), st.booleans())
def test_any_tokens_stream_to_what_the_library_decodes(ids, skip):
    tokenizer = shipped_tokenizer()
    assert "".join(stream(tokenizer, ids, skip=skip)) == tokenizer.decode(
        ids, skip_special_tokens=skip
    )


def test_an_unfinished_character_becomes_a_replacement_at_the_end(tokenizer):
    ids = tokenizer.encode("€", add_special_tokens=False)
    assert len(ids) == 3
    assert stream(tokenizer, ids[:2]) == ["", "", "\ufffd"]


def test_special_tokens_are_skipped_or_shown(tokenizer):
    ids = tokenizer.encode("a<|eos|>b", add_special_tokens=True)
    assert "".join(stream(tokenizer, ids)) == "ab"
    assert "".join(stream(tokenizer, ids, skip=False)) == "<|bos|>a<|eos|>b"


def test_sentencepiece_keeps_the_space_before_a_continuation(sentencepiece):
    # Decoding the output alone would drop it.
    assert "".join(stream(sentencepiece, [4], prompt=[2, 3])) == " world"


def test_sentencepiece_bytes_wait_for_their_character(sentencepiece):
    ids = [6 + byte for byte in "€".encode()]
    assert stream(sentencepiece, ids) == ["", "", "€", ""]


def test_other_decoders_stream_by_window(wordpiece):
    ids = [1, 2, 3] * 30
    pieces = stream(wordpiece, ids, prompt=[3])
    assert "".join(pieces) == " playing now" * 30


def test_token_text_of_a_partial_character_shows_its_bytes(tokenizer):
    first = tokenizer.encode("€", add_special_tokens=False)[0]
    assert tokenizer.token_bytes(first) == b"\xe2"
    assert tokenizer.token_text(first) == "bytes:\\xe2"


def test_a_token_out_of_the_vocabulary_shows_nothing(tokenizer):
    assert tokenizer.token_bytes(999_999) == b""


def test_missing_and_broken_files_are_named(tmp_path):
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: no such file"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)


def test_special_tokens_of_the_configuration_become_strings(tmp_path):
    shutil.copy(MODEL / "tokenizer.json", tmp_path)
    config = {"eos_token": {"content": "</s>", "lstrip": False}, "pad_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer(tmp_path).config == {"eos_token": "</s>", "pad_token": None}
