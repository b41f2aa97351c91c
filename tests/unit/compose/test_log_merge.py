from __future__ import annotations

import json
from pathlib import Path

import pytest

from compose.log_file import LogFile
from compose.log_merge import Filter, Line, LogReader, parse


def event(second: float, name: str, level: str = "info", **fields: str) -> bytes:
    stamp = f"2026-01-01T00:00:{second:09.6f}Z"
    return json.dumps({**fields, "event": name, "level": level, "timestamp": stamp}).encode()


def write(path: Path, *lines: bytes) -> None:
    with path.open("ab") as file:
        file.writelines(line + b"\n" for line in lines)


def names(lines: list[Line]) -> list[str]:
    return [
        f"{line.member}:{json.loads(line.text)['event'] if line.level else line.text}"
        for line in lines
    ]


def test_files_are_merged_by_time_and_stray_lines_stay_where_they_were(tmp_path: Path) -> None:
    write(tmp_path / "a.log", event(1, "one"), b"Traceback", b"  of one", event(5, "five"))
    write(tmp_path / "b.log", event(2, "two"), event(7, "seven"))
    write(tmp_path / "c.log.1", event(3, "three"))
    write(tmp_path / "c.log", event(6, "six"))
    reader = LogReader(tmp_path)
    assert names(list(reader.history())) == [
        "a:one", "a:Traceback", "a:  of one", "b:two", "c:three", "a:five", "c:six", "b:seven",
    ]  # fmt: skip
    reader.close()


def test_news_are_whole_lines_of_old_and_new_processes(tmp_path: Path) -> None:
    write(tmp_path / "a.log", event(1, "one"))
    reader = LogReader(tmp_path)
    assert names(list(reader.history())) == ["a:one"]
    assert reader.news() == []
    late = event(4, "four")
    with (tmp_path / "a.log").open("ab") as file:
        file.write(late[:20])
    assert reader.news() == []
    with (tmp_path / "a.log").open("ab") as file:
        file.write(late[20:] + b"\n")
    write(tmp_path / "b.log", event(3, "three"))
    assert names(reader.news()) == ["b:three", "a:four"]
    reader.close()


def test_nothing_is_lost_when_a_file_is_put_aside(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "a.log", max_bytes=300)
    reader = LogReader(tmp_path)
    log.write(event(0, "0") + b"\n")
    read = names(list(reader.history()))
    for number in range(1, 20):
        log.write(event(number, str(number)) + b"\n")
        read += names(reader.news())
    assert read == [f"a:{number}" for number in range(20)]
    assert (tmp_path / "a.log.1").exists()
    log.close()
    reader.close()


def test_only_the_members_that_were_asked_for_are_read(tmp_path: Path) -> None:
    write(tmp_path / "a.log", event(1, "one"))
    write(tmp_path / "b.log", event(2, "two"))
    reader = LogReader(tmp_path, ["b"])
    assert names(list(reader.history())) == ["b:two"]
    write(tmp_path / "a.log", event(3, "three"))
    assert reader.news() == []
    reader.close()


@pytest.mark.parametrize(("request_", "shown"), [
    ("abc", True), ("cmpl-1", True), ("cmpl-1-0.0", True), ("ab", False), ("cmpl-2", False),
    ("cmpl", True),
])  # fmt: skip
def test_a_request_is_found_by_its_id_or_its_answers(request_: str, shown: bool) -> None:
    line = parse("router-0", event(1, "x", trace="abc", request="cmpl-1-0.0"), 0.0)
    assert Filter(request=request_).wants(line) == shown


def test_levels_below_the_least_are_left_out_and_stray_lines_are_not() -> None:
    least = Filter(level="warning")
    assert not least.wants(parse("a", event(1, "x", "info"), 0.0))
    assert least.wants(parse("a", event(1, "x", "warning"), 0.0))
    assert least.wants(parse("a", b"Segmentation fault", 0.0))


def test_lines_of_the_console_form_have_a_time_and_a_level() -> None:
    colored = b"\x1b[2m2026-01-01T00:00:01.5\x1b[0m [\x1b[32mwarning  \x1b[0m] lane.lost trace=abc"
    line = parse("a", colored, 0.0)
    assert line.level == "warning"
    assert line.at > 0
    assert Filter(request="abc", level="warning").wants(line)
    assert not Filter(request="xyz").wants(line)


@pytest.mark.parametrize("raw", [b"", b"{", b"{}", b"[1]", b"\xff\xfe", b'{"timestamp": 3}'])
def test_any_bytes_are_a_line(raw: bytes) -> None:
    assert parse("a", raw, 7.0).at == 7.0


def test_a_full_disk_costs_lines_and_nothing_else() -> None:
    log = LogFile(Path("/dev/full"))
    log.write(b"lost\n")
    assert log.fault == "No space left on device"
    assert log.tail() == ("lost",)
    log.close()
