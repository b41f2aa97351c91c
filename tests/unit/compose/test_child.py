import asyncio
import os
import signal
import sys

import pytest

from compose.child import Child
from compose.log_file import LogFile
from compose.processes import ProcessSpec

DEADLINE_S = 60
# Children wait for signals by ``sigwait``: one that comes between a line of output and a
# ``signal.pause`` would be handled before the pause, which then never ends.


@pytest.fixture
def make(tmp_path):
    def child(
        code: str | None, lines: list[bytes] | None = None, inherits: tuple[int, ...] = ()
    ) -> Child:
        argv = ("sleep", "60") if code is None else (sys.executable, "-u", "-c", code)
        spec = ProcessSpec("x", "planner", argv, inherits)
        log = LogFile(tmp_path / "x.log")
        return Child(spec, log, (lines if lines is not None else []).append)

    # A shell starts what is in its background with SIGINT ignored, and a child inherits that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield child
    signal.signal(signal.SIGINT, before)


def run(main):
    async def bounded():
        async with asyncio.timeout(DEADLINE_S):
            return await main()

    return asyncio.run(bounded())


async def life(child: Child) -> int:
    await child.start()
    return await child.run()


class Said(asyncio.Event):
    """A line sink that tells when the first line came."""

    def append(self, line: bytes) -> None:
        self.set()


def test_output_of_both_streams_reaches_log_and_caller(make, tmp_path):
    lines: list[bytes] = []
    code = "import sys; print('out'); sys.stderr.write('err'); sys.exit(3)"
    assert run(lambda: life(make(code, lines))) == 3
    assert lines == [b"out\n", b"err\n"]
    assert (tmp_path / "x.log").read_bytes() == b"out\nerr\n"


def test_an_endless_line_is_cut_and_not_lost(make, tmp_path):
    assert run(lambda: life(make("print('a' * 1_000_000)"))) == 0
    assert (tmp_path / "x.log").read_bytes().count(b"a") == 1_000_000


def test_a_child_that_obeys_is_stopped_gently(make):
    async def main():
        said = Said()
        child = make("import signal\n"
                     "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})\n"
                     "print('up'); signal.sigwait({signal.SIGINT})", said)  # fmt: skip
        running = asyncio.ensure_future(life(child))
        await said.wait()
        assert child.pid is not None
        assert await child.stop(grace_s=DEADLINE_S)
        return await running, child.pid

    assert run(main) == (0, None)


def test_a_child_that_does_not_obey_is_killed(make):
    async def main():
        said = Said()
        child = make("import signal\n"
                     "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
                     "print('up')\nwhile True: signal.pause()", said)  # fmt: skip
        running = asyncio.ensure_future(life(child))
        await said.wait()
        assert not await child.stop(grace_s=0.1)
        return await running

    assert run(main) == -signal.SIGKILL


def test_a_stop_before_the_process_exists_still_stops_it(make):
    async def main():
        # Not a Python: one that is interrupted while it starts may end with 1 instead.
        child = make(None)
        running = asyncio.ensure_future(life(child))
        stopped = asyncio.ensure_future(child.stop(grace_s=DEADLINE_S))
        assert await stopped
        return await running

    assert run(main) == -signal.SIGINT


def test_a_child_that_is_to_leave_gets_another_signal_and_what_it_inherits(make):
    async def main():
        said = Said()
        reader, writer = os.pipe()
        child = make("import os, signal, sys\n"
                     "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})\n"
                     f"os.write({writer}, b'open')\n"
                     "print('up'); signal.sigwait({signal.SIGTERM}); sys.exit(7)",
                     said, inherits=(writer,))  # fmt: skip
        running = asyncio.ensure_future(life(child))
        await said.wait()
        assert os.read(reader, 9) == b"open"
        os.close(reader)
        os.close(writer)
        assert await child.leave(limit_s=DEADLINE_S)
        return await running

    assert run(main) == 7


def test_a_cancelled_run_leaves_no_process(make):
    async def main():
        said = Said()
        child = make("import signal; print('up'); signal.pause()", said)
        running = asyncio.ensure_future(life(child))
        await said.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        return child.pid

    assert run(main) is None
