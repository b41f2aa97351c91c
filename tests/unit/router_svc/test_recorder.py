from __future__ import annotations

import asyncio
import stat
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import structlog
from ep_kernels.routing import Counts
from safetensors import safe_open

from mesh.messages import Record, Recorded
from router_svc.recorder import Recorder
from router_svc.recordings import Recordings


def step(recorder: Recorder, counts: Counts, expert: int, tokens: int, decodes: int = 0) -> None:
    recorder.begin_step()
    counts.tokens[:, expert] += tokens
    counts.decodes[:, expert] += decodes
    recorder.end_step(tokens)


def written(path: Path):
    with safe_open(path, "np") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


def test_steps_are_kept_apart_and_written_to_a_private_file(tmp_path: Path) -> None:
    counts = Counts(2, 3)
    recorder = Recorder(counts, (1, 4), 10)
    step(recorder, counts, 0, 99)  # nobody records yet
    recorder.start(1234.5)
    step(recorder, counts, 1, 6)
    step(recorder, counts, 2, 2, decodes=1)
    recorder.stop()
    step(recorder, counts, 0, 99)
    path = recorder.write(tmp_path / "records", "r0")
    assert path == tmp_path / "records" / "r0-1.safetensors"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    tensors, metadata = written(path)
    assert tensors["experts"].dtype == tensors["decodes"].dtype == np.int32
    assert tensors["experts"].tolist() == [[[0, 6, 0]] * 2, [[0, 0, 2]] * 2]
    assert tensors["decodes"].tolist() == [[[0, 0, 0]] * 2, [[0, 0, 1]] * 2]
    assert tensors["tokens"].tolist() == [6, 2]
    assert metadata == {"moe_layers": "1,4", "started": "1234.500", "router": "r0"}
    assert recorder.write(tmp_path / "records", "r0").name == "r0-2.safetensors"
    assert len(list((tmp_path / "records").iterdir())) == 2


def test_the_newest_steps_stay_and_a_new_start_forgets_them(tmp_path: Path) -> None:
    counts = Counts(1, 1)
    recorder = Recorder(counts, (1,), 3)
    recorder.start(0.0)
    for tokens in range(1, 6):
        step(recorder, counts, 0, tokens)
    assert recorder.steps == 3
    assert written(recorder.write(tmp_path, "r"))[0]["tokens"].tolist() == [3, 4, 5]
    recorder.start(1.0)
    assert recorder.steps == 0
    assert written(recorder.write(tmp_path, "r"))[0]["experts"].shape == (0, 1, 1)


def test_a_step_that_began_before_the_recording_is_not_in_it() -> None:
    counts = Counts(1, 1)
    recorder = Recorder(counts, (1,), 3)
    recorder.begin_step()
    recorder.start(0.0)
    recorder.end_step(1)
    assert recorder.steps == 0


def test_a_command_is_carried_out_once_and_answered_each_time(tmp_path: Path) -> None:
    counts = Counts(1, 1)
    recorder: Recorder | None = None
    answers: asyncio.Queue[Recorded] = asyncio.Queue()
    ctx = SimpleNamespace(id="r", incarnation=3, run_dir=tmp_path, log=structlog.get_logger())
    recordings = Recordings(ctx, lambda: recorder, answers.put_nowait)

    async def ask(number: int, action: str) -> Recorded:
        recordings.command(Record(command=number, action=action))
        async with asyncio.timeout(20.0):
            return await answers.get()

    async def script() -> None:
        nonlocal recorder
        running = asyncio.ensure_future(recordings.run())
        assert "loading" in (await ask(1, "start")).error
        recorder = Recorder(counts, (1,), 5)
        assert (await ask(2, "start")).recording
        step(recorder, counts, 0, 4)
        assert (await ask(2, "start")).steps == 0  # as it was then
        dumped = await ask(3, "dump")
        assert dumped == Recorded(
            id="r",
            incarnation=3,
            command=3,
            recording=True,
            steps=1,
            path=str(tmp_path / "records" / "r-1.safetensors"),
        )
        assert await ask(3, "dump") == dumped
        assert len(list((tmp_path / "records").iterdir())) == 1
        stopped = await ask(4, "stop")
        assert (stopped.recording, stopped.steps) == (False, 1)
        running.cancel()

    asyncio.run(script())


def test_a_file_that_cannot_be_written_is_an_answer_too(tmp_path: Path) -> None:
    (tmp_path / "records").write_text("in the way")
    recorder = Recorder(Counts(1, 1), (1,), 5)
    with pytest.raises(OSError, match="exists"):
        recorder.write(tmp_path / "records", "r")
    answers: asyncio.Queue[Recorded] = asyncio.Queue()
    ctx = SimpleNamespace(id="r", incarnation=3, run_dir=tmp_path, log=structlog.get_logger())
    recordings = Recordings(ctx, lambda: recorder, answers.put_nowait)

    async def script() -> None:
        recordings.command(Record(command=1, action="dump"))
        running = asyncio.ensure_future(recordings.run())
        async with asyncio.timeout(20.0):
            answer = await answers.get()
        running.cancel()
        assert "cannot write" in answer.error
        assert answer.path == ""

    asyncio.run(script())
