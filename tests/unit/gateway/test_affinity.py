from gateway.affinity import PrefixTable

A = list(range(100))


def test_the_longest_known_prefix_decides():
    table = PrefixTable(block_tokens=4)
    table.record(A[:12], "r0")
    table.record([*A[:8], 7, 7, 7, 7], "r1")
    assert table.match(A[:40]) == "r0"
    assert table.match(A[:8] + [7] * 9) == "r1"
    assert table.match(A[:9]) == "r1"


def test_less_than_a_block_matches_nothing():
    table = PrefixTable(block_tokens=4)
    table.record(A[:3], "r0")
    assert table.match(A[:3]) == ""


def test_blocks_count_only_as_a_prefix():
    table = PrefixTable(block_tokens=4)
    table.record(A[:8], "r0")
    assert table.match(A[4:8]) == ""


def test_a_lost_router_is_forgotten():
    table = PrefixTable(block_tokens=4)
    table.record(A[:8], "r0")
    table.forget("r0")
    assert table.match(A[:8]) == ""


def test_the_oldest_prefixes_make_room():
    table = PrefixTable(capacity=3, block_tokens=4)
    table.record(A[:4], "r0")
    table.record(A[20:32], "r1")
    assert table.match(A[:4]) == ""
    assert table.match(A[20:32]) == "r1"
