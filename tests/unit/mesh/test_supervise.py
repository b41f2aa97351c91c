from __future__ import annotations

import asyncio

import pytest
import structlog

from mesh.supervise import ActorCrashed, CannotServe, Supervisor

LOG = structlog.get_logger("test")


def _actor(name: str, ended: list[str]):
    async def run() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(name)

    return run


def test_actors_stop_in_reverse_order_each_awaited(run) -> None:
    ended: list[str] = []

    async def main() -> None:
        async with Supervisor(LOG) as actors:
            for name in ("first", "second", "third"):
                actors.start(name, _actor(name, ended))
            await asyncio.sleep(0)

    run(main())
    assert ended == ["third", "second", "first"]


def test_a_crash_is_logged_with_its_name_and_ends_the_service(run) -> None:
    ended: list[str] = []

    async def crash() -> None:
        raise ValueError("bug")

    async def main() -> None:
        async with Supervisor(LOG) as actors:
            actors.start("bystander", _actor("bystander", ended))
            await asyncio.sleep(0)
            actors.start("faulty", crash)
            await asyncio.Event().wait()

    with (
        structlog.testing.capture_logs() as logs,
        pytest.raises(ActorCrashed, match="faulty crashed: ValueError: bug") as caught,
    ):
        run(main())
    assert caught.value.actor == "faulty"
    assert ended == ["bystander"]
    assert [(line["event"], line["actor"]) for line in logs] == [("actor.crashed", "faulty")]


def test_an_answer_is_no_crash(run) -> None:
    class Other(Exception):
        pass

    for error in (CannotServe("no such model"), Other("x")):

        async def refuse(error: Exception = error) -> None:
            raise error

        async def main(refuse=refuse) -> None:
            async with Supervisor(LOG, quiet=(Other,)) as actors:
                actors.start("loader", refuse)
                await asyncio.Event().wait()

        with structlog.testing.capture_logs() as logs, pytest.raises(type(error)):
            run(main())
        assert logs == []


def test_a_crash_while_stopping_is_not_lost(run) -> None:
    ended: list[str] = []

    async def stubborn() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError("while stopping")

    async def main() -> None:
        async with Supervisor(LOG) as actors:
            actors.start("first", _actor("first", ended))
            actors.start("stubborn", stubborn)
            await asyncio.sleep(0)

    with pytest.raises(ActorCrashed, match="stubborn"):
        run(main())
    assert ended == ["first"]


def test_an_error_of_the_body_stops_the_actors_and_is_raised(run) -> None:
    ended: list[str] = []

    async def main() -> None:
        async with Supervisor(LOG) as actors:
            actors.start("first", _actor("first", ended))
            await asyncio.sleep(0)
            raise KeyError("body")

    with pytest.raises(KeyError):
        run(main())
    assert ended == ["first"]


def test_jobs_give_their_result(run) -> None:
    async def job() -> int:
        return 3

    async def main() -> int:
        async with Supervisor(LOG) as actors:
            return await actors.task(job())

    assert run(main()) == 3
