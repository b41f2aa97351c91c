"""One child process: started, its output kept, stopped gently and then by force."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable

from compose.log_file import LogFile
from compose.processes import ProcessSpec

_MAX_LINE_BYTES = 256 * 1024


class Child:
    """A process in a group of its own, so that a terminal's Ctrl-C reaches the launcher alone and
    the launcher decides the order of stopping.

    ``on_line`` sees each line that the child writes, after it went to ``log``.
    """

    def __init__(self, spec: ProcessSpec, log: LogFile, on_line: Callable[[bytes], None]) -> None:
        self.spec = spec
        self._log = log
        self._on_line = on_line
        self._process: asyncio.subprocess.Process | None = None
        self._asked: signal.Signals | None = None
        """The signal by which it was told to end."""
        self._ended = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """None before the process exists and after it ended."""
        if self._process is None or self._process.returncode is not None:
            return None
        return self._process.pid

    async def start(self) -> None:
        """Starts the process; called once, and ``run`` right after it.

        The process is forked by the calling thread, which must outlive it: children that die with
        their parent watch that thread. Raises ``OSError`` for a program that is not there.
        """
        self._log.start_tail()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self.spec.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                process_group=0,
                pass_fds=self.spec.inherits,
            )
        except BaseException:
            self._ended.set()
            raise
        if self._asked is not None:
            self._signal(self._asked)

    async def run(self) -> int:
        """Keeps the output of the started process, and returns its exit code (negative: the
        signal that ended it). Cancelled, it kills the process.
        """
        process = self._process
        assert process is not None
        assert process.stdout is not None
        try:
            async for line in _lines(process.stdout):
                self._log.write(line)
                self._on_line(line)
            return await process.wait()
        finally:
            if process.returncode is None:
                self._signal(signal.SIGKILL)
                await process.wait()
            self._ended.set()

    async def stop(self, grace_s: float) -> bool:
        """SIGINT, upon which a service stops without delay, then SIGKILL to the whole group after
        ``grace_s``; True if it ended in time.
        """
        return await self._end(signal.SIGINT, grace_s)

    async def leave(self, limit_s: float) -> bool:
        """SIGTERM, upon which a service first ends or hands over its work, then SIGKILL to the
        whole group after ``limit_s``; True if it ended in time.
        """
        return await self._end(signal.SIGTERM, limit_s)

    async def _end(self, number: signal.Signals, limit_s: float) -> bool:
        self._asked = number
        self._signal(number)
        try:
            async with asyncio.timeout(limit_s):
                await self._ended.wait()
        except TimeoutError:
            self.kill()
            await self._ended.wait()
            return False
        return True

    def kill(self) -> None:
        self._asked = signal.SIGKILL
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        pid = self.pid
        if pid is None:
            return
        try:
            if number is signal.SIGKILL:
                os.killpg(pid, number)
            else:
                os.kill(pid, number)
        except ProcessLookupError:
            return  # it ended a moment ago; ``run`` is about to see that


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Lines of ``reader``, newline included; one without an end is cut at 256 KiB."""
    rest = b""
    while chunk := await reader.read(65536):
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield line + b"\n"
        if len(rest) > _MAX_LINE_BYTES:
            yield rest + b"\n"
            rest = b""
    if rest:
        yield rest + b"\n"
