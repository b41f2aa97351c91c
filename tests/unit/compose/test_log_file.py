from compose.log_file import TAIL_LINES, LogFile, error_text, readable


def test_tail_holds_the_last_lines_only(tmp_path):
    log = LogFile(tmp_path / "a.log")
    for i in range(100):
        log.write(b"line %d\n" % i)
    assert log.tail() == tuple(f"line {i}" for i in range(100 - TAIL_LINES, 100))
    assert (tmp_path / "a.log").read_bytes().count(b"\n") == 100
    log.start_tail()
    log.write(b"another process\n")
    assert log.tail() == ("another process",)
    log.close()


def test_log_uses_at_most_twice_its_bound_and_keeps_the_newest(tmp_path):
    log = LogFile(tmp_path / "a.log", max_bytes=1000)
    for i in range(500):
        log.write(b"%09d\n" % i)
    log.close()
    assert {p.name for p in tmp_path.iterdir()} == {"a.log", "a.log.1"}
    assert all(p.stat().st_size <= 1000 for p in tmp_path.iterdir())
    both = (tmp_path / "a.log.1").read_bytes() + (tmp_path / "a.log").read_bytes()
    numbers = [int(line) for line in both.split()]
    assert numbers == list(range(numbers[0], 500))


def test_a_log_goes_on_where_the_last_process_left_it(tmp_path):
    for text in (b"first\n", b"second\n"):
        log = LogFile(tmp_path / "a.log")
        log.write(text)
        log.close()
    assert (tmp_path / "a.log").read_bytes() == b"first\nsecond\n"


def test_errors_are_found_in_json_and_in_console_form():
    assert error_text(b'{"level":"error","event":"lane.lost","peer":"expert-1"}\n') == (
        "lane.lost peer=expert-1"
    )
    assert error_text(b"2026-01-01 [error    ] lane.lost peer=expert-1\n") is not None
    assert error_text(b"2026-01-01 [\x1b[31m\x1b[1merror    \x1b[0m] lane.lost\n") is not None


def test_other_lines_are_no_errors():
    assert error_text(b'{"level":"info","event":"error.none"}\n') is None
    assert error_text(b"{broken\n") is None
    assert error_text(b"[1, 2]\n") is None
    assert error_text(b"an error in plain words\n") is None
    assert error_text(b"\xff\xfe\n") is None


def test_a_json_line_is_shown_readable_with_its_traceback_below():
    line = (
        '{"event":"service.crashed","level":"error","timestamp":"T","x":1,'
        '"exception":"Trace\\n  a"}'
    )
    assert readable(line).splitlines() == ["T error   service.crashed x=1", "Trace", "  a"]
    assert readable("plain") == "plain"
