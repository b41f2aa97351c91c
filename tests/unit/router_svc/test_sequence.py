from __future__ import annotations

from mesh.messages import Sampling
from router_svc.blocks import chain_key
from router_svc.sequence import Sequence, stop_ids


def sequence(prompt: list[int], sampling: Sampling, eos: tuple[int, ...] = (1,)) -> Sequence:
    return Sequence(
        request="r",
        owner=b"g",
        trace="t",
        prompt_len=len(prompt),
        tokens=list(prompt),
        sampling=sampling,
        stop_ids=stop_ids(sampling, eos),
    )


def test_it_ends_by_length_with_the_last_token_kept() -> None:
    s = sequence([5], Sampling(max_tokens=2))
    assert s.append(7) == (None, -1)
    assert s.append(8) == ("length", -1)
    assert s.tokens == [5, 7, 8]


def test_an_end_of_sequence_token_ends_it_and_is_not_kept() -> None:
    s = sequence([5], Sampling(max_tokens=9))
    assert s.append(1) == ("stop", 1)
    assert s.tokens == [5]


def test_ignore_eos_keeps_own_stop_tokens() -> None:
    sampling = Sampling(max_tokens=9, ignore_eos=True, stop_token_ids=(4,))
    s = sequence([5], sampling)
    assert s.append(1) == (None, -1)
    assert s.append(4) == ("stop", 4)


def test_a_stop_token_before_min_tokens_is_an_ordinary_token() -> None:
    s = sequence([5], Sampling(max_tokens=9, min_tokens=1))
    assert s.append(1) == (None, -1)
    assert s.append(1) == ("stop", 1)


def test_keys_cover_full_blocks_of_what_it_holds_now() -> None:
    s = sequence([1, 2, 3, 4, 5], Sampling(max_tokens=9))
    first = chain_key(b"", [1, 2])
    assert s.full_block_keys(2, 5) == [first, chain_key(first, [3, 4])]
    assert s.full_block_keys(2, 3) == [first]
    s.tokens.append(6)
    assert s.full_block_keys(2, 6)[2] == chain_key(chain_key(first, [3, 4]), [5, 6])


def test_the_last_token_drawn_needs_no_room_in_the_cache() -> None:
    assert sequence([1, 2, 3], Sampling(max_tokens=1)).final_cached_len == 3
    assert sequence([1, 2, 3], Sampling(max_tokens=5)).final_cached_len == 7
    assert sequence([1, 2, 3], Sampling(max_tokens=0)).final_cached_len == 3
