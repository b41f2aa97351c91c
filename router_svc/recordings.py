"""Carries out the planner's ``Record`` commands, each once however often it comes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from mesh.messages import Record, Recorded
from mesh.service import Context
from router_svc.recorder import Recorder

_MOST_WAITING = 16
"""Commands that wait for one that is being carried out; more are ignored: they come again."""
_REMEMBERED = 64
"""Answers that are kept for commands that come again."""


class Recordings:
    """One actor; ``command`` may be called on its event loop's thread."""

    def __init__(
        self,
        ctx: Context,
        recorder: Callable[[], Recorder | None],
        answer: Callable[[Recorded], object],
    ) -> None:
        """``recorder()`` is None while weights load. ``answer`` sends to the planner; what it
        cannot send is asked for again.
        """
        self._ctx = ctx
        self._recorder = recorder
        self._answer = answer
        self._commands: asyncio.Queue[Record] = asyncio.Queue(_MOST_WAITING)
        self._answers: dict[int, Recorded] = {}  # by command, oldest first

    def command(self, command: Record) -> None:
        """Carry it out soon."""
        if self._commands.full():
            self._ctx.log.warning("command.ignored", command=command.command)
        else:
            self._commands.put_nowait(command)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            command = await self._commands.get()
            answer = self._answers.get(command.command)
            if answer is None:
                answer = self._answers[command.command] = await self._carry_out(command)
                if len(self._answers) > _REMEMBERED:
                    del self._answers[next(iter(self._answers))]
            self._answer(answer)

    async def _carry_out(self, command: Record) -> Recorded:
        recorder = self._recorder()
        path, error = "", ""
        if recorder is None:
            error = "the router is loading weights"
        else:
            match command.action:
                case "start":
                    recorder.start(time.time())
                case "stop":
                    recorder.stop()
                case "dump":
                    path, error = await self._write(recorder)
        self._ctx.log.info("record.done", action=command.action, path=path, error=error)
        return Recorded(
            id=self._ctx.id,
            incarnation=self._ctx.incarnation,
            command=command.command,
            recording=recorder is not None and recorder.recording,
            steps=0 if recorder is None else recorder.steps,
            path=path,
            error=error,
        )

    async def _write(self, recorder: Recorder) -> tuple[str, str]:
        """Path of the file, or what went wrong."""
        directory = self._ctx.run_dir / "records"
        try:
            return str(await asyncio.to_thread(recorder.write, directory, self._ctx.id)), ""
        except OSError as error:
            return "", f"cannot write to {directory}: {error}"
