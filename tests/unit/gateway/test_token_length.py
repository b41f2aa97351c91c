import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from gateway.byte_level import BYTE_OF_CHAR
from gateway.token_length import longest_token
from tests.unit.gateway.scripted_mesh import MODEL

SHIPPED = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
BYTES = {char: i for i, char in enumerate(BYTE_OF_CHAR)}
FALLBACK = {f"<0x{byte:02X}>": byte for byte in range(256)}


def byte_level(vocab=BYTES, *, pre=()):
    made = Tokenizer(models.BPE(vocab, []))
    made.pre_tokenizer = pre_tokenizers.Sequence([*pre, pre_tokenizers.ByteLevel()])
    return made


@settings(max_examples=50, deadline=None)
@given(st.text(st.sampled_from(" .a\n\u20ac"), max_size=200))
def test_no_text_has_fewer_tokens_than_the_bound_says(text):
    tokens = SHIPPED.encode(text, add_special_tokens=False).ids
    assert len(text) <= longest_token(SHIPPED) * len(tokens)


def test_the_bound_is_that_of_the_longest_token():
    assert longest_token(SHIPPED) == 32
    assert longest_token(byte_level()) == 1
    added = byte_level()
    added.add_special_tokens(["<|eos|>"])
    assert longest_token(added) == len("<|eos|>")


def test_sentencepiece_with_all_bytes_has_a_bound(sentencepiece):
    assert sentencepiece.longest_token == len("<0x00>")


def with_normalizer(normalizer):
    made = Tokenizer(models.BPE(FALLBACK, [], byte_fallback=True))
    made.normalizer = normalizer
    return made


def test_mixtrals_normalizer_keeps_every_character():
    keeping = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    assert longest_token(with_normalizer(normalizers.Sequence(keeping))) == len("<0x00>")


def stripping():
    made = byte_level()
    made.add_special_tokens([AddedToken("<sep>", lstrip=True)])
    return made


@pytest.mark.parametrize(
    "lossy",
    [
        Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]")),
        Tokenizer(models.BPE(BYTES, [])),
        byte_level({char: id_ for char, id_ in BYTES.items() if char != "a"}),
        byte_level(pre=[pre_tokenizers.Split(" ", "removed")]),
        byte_level(pre=[pre_tokenizers.WhitespaceSplit()]),
        with_normalizer(normalizers.Strip()),
        with_normalizer(normalizers.Sequence([normalizers.NFC()])),
        with_normalizer(normalizers.Replace("  ", "\u2581")),
        stripping(),
    ],
)
def test_tokenizers_that_may_drop_text_have_no_bound(lossy):
    assert longest_token(lossy) is None
