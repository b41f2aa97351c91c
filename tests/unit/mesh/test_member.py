from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import pytest
import structlog

from mesh.links import Net, Publisher, ServerLink
from mesh.member import Command, Member, RefusedByPlanner, request_status
from mesh.messages import (
    AssignSlots,
    FromPlanner,
    GetStatus,
    GetView,
    Goodbye,
    Heartbeat,
    Hello,
    Load,
    Placement,
    Record,
    Refused,
    SlotsReady,
    Status,
    ToPlanner,
    Unknown,
    View,
    Welcome,
)
from mesh.messages import Member as MeshMember

LOG = structlog.get_logger("test")


class Scene:
    """A member that runs, and the planner's two sockets in the hands of the test."""

    def __init__(self, net: Net, address: str) -> None:
        self.net = net
        self.address = address
        self.views: asyncio.Queue[View] = asyncio.Queue()
        self.commands: asyncio.Queue[Command] = asyncio.Queue()
        self.load = Load()
        self.heartbeat_ms = 20
        self.member = Member(
            self.net,
            address,
            hello=lambda: Hello(
                id="expert-0", role="expert", incarnation=5, pid=1, host="h", model_digest="d"
            ),
            load=lambda: self.load,
            on_view=self.views.put_nowait,
            on_command=self.commands.put_nowait,
            log=LOG,
        )
        self.peer = b""
        self.open_planner()

    def open_planner(self) -> None:
        self.planner: ServerLink[ToPlanner, FromPlanner] = ServerLink(
            self.net, self.address, receives=ToPlanner
        )
        self.publisher: Publisher[View] = Publisher(self.net, self.address + ".pub")

    def close_planner(self) -> None:
        self.planner.close()
        self.publisher.close()

    async def hear(self, kind: type[msgspec.Struct]) -> msgspec.Struct:
        """The next message of a kind; others are skipped."""
        while True:
            self.peer, message = await self.planner.recv()
            if isinstance(message, kind):
                return message

    def say(self, message: FromPlanner) -> None:
        assert self.planner.send(self.peer, message)

    async def welcome(self) -> None:
        await self.hear(Hello)
        self.say(
            Welcome(protocol=1, heartbeat_ms=self.heartbeat_ms, broadcast=self.publisher.address)
        )

    async def play(self, script: Callable[[Scene], object]) -> None:
        """Run the member beside the script, then stop it."""
        running = asyncio.ensure_future(self.member.run())
        acting = asyncio.ensure_future(script(self))
        try:
            await asyncio.wait([running, acting], return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                await running
            await acting
        finally:
            for task in (acting, running):
                task.cancel()
            await asyncio.wait([running, acting])
            self.close_planner()


def maker(incarnation: int) -> MeshMember:
    """The planner's line in its views."""
    return MeshMember(
        id="planner", role="planner", incarnation=incarnation, pid=1, host="h", state="ready"
    )


@pytest.fixture
def play(run, net: Net, address: str):
    def runner(script: Callable[[Scene], object]) -> None:
        async def main() -> None:
            await Scene(net, address).play(script)

        run(main())

    return runner


def test_a_member_says_hello_then_beats_and_asks_for_the_view(play) -> None:
    async def script(scene: Scene) -> None:
        await scene.welcome()
        await scene.hear(GetView)
        beat = await scene.hear(Heartbeat)
        assert beat == Heartbeat(id="expert-0", incarnation=5, state="joining", load=Load())
        scene.load = Load(step=3)
        while (await scene.hear(Heartbeat)).load.step != 3:
            pass

    play(script)


def test_what_is_to_be_reported_now_does_not_wait_for_the_next_beat(play) -> None:
    async def script(scene: Scene) -> None:
        scene.heartbeat_ms = 3_600_000
        await scene.welcome()
        await scene.hear(Heartbeat)
        scene.load = Load(epoch=7)
        scene.member.report_now()
        while (await scene.hear(Heartbeat)).load.epoch != 7:
            pass

    play(script)


def test_a_hello_brings_the_newest_placement_that_the_member_knows(play) -> None:
    placement = Placement(
        epoch=4,
        moe_layers=(1,),
        num_experts=1,
        ranks=("expert-0",),
        slots_per_rank=(1,),
        physical_to_logical=((0,),),
    )

    async def script(scene: Scene) -> None:
        assert (await scene.hear(Hello)).placement is None
        scene.say(Welcome(protocol=1, heartbeat_ms=20, broadcast=scene.publisher.address))
        scene.say(View(version=9, members=(), placement=placement))
        await scene.views.get()
        scene.say(Unknown())
        while (hello := await scene.hear(Hello)).placement is None:
            pass
        assert hello.placement == placement

    play(script)


def test_a_change_of_state_is_reported_at_once(play) -> None:
    async def script(scene: Scene) -> None:
        scene.heartbeat_ms = 3_600_000
        await scene.welcome()
        await scene.hear(Heartbeat)
        scene.member.set_state("loading", detail="reading", progress=0.5)
        beat = await scene.hear(Heartbeat)
        assert (beat.state, beat.detail, beat.progress) == ("loading", "reading", 0.5)
        scene.member.set_state("ready")
        beat = await scene.hear(Heartbeat)
        assert (beat.state, beat.detail, beat.progress) == ("ready", "", 1.0)

    play(script)


def test_views_come_by_message_and_by_broadcast_and_only_newer_ones_count(play) -> None:
    async def script(scene: Scene) -> None:
        await scene.welcome()
        await scene.hear(GetView)
        scene.say(View(version=5, members=()))
        assert (await scene.views.get()).version == 5
        scene.say(View(version=4, members=()))
        scene.say(View(version=5, members=()))
        scene.say(View(version=6, members=()))
        assert (await scene.views.get()).version == 6
        version = 6
        while scene.views.empty():  # until the subscription stands
            version += 1
            scene.publisher.send(View(version=version, members=()))
            await scene.hear(Heartbeat)
        assert scene.member.view is not None
        while (await scene.hear(Heartbeat)).view_version != scene.member.view.version:
            pass

    play(script)


def test_commands_are_handed_on_and_answers_sent(play) -> None:
    command = AssignSlots(command=1, epoch=1, moe_layers=(1,), slots=((0,),))

    async def script(scene: Scene) -> None:
        ready = SlotsReady(id="expert-0", incarnation=5, command=1, epoch=1)
        assert not scene.member.send(ready), "nobody has welcomed us yet"
        await scene.welcome()
        await scene.hear(Heartbeat)
        scene.say(command)
        scene.say(command)
        scene.say(Record(command=2, action="start"))
        assert await scene.commands.get() == command
        assert await scene.commands.get() == command
        assert await scene.commands.get() == Record(command=2, action="start")
        assert scene.member.send(ready)
        assert await scene.hear(SlotsReady) == ready

    play(script)


def test_a_planner_that_forgot_the_member_is_told_again(play) -> None:
    async def script(scene: Scene) -> None:
        await scene.welcome()
        await scene.hear(Heartbeat)
        scene.say(Unknown())
        await scene.welcome()
        await scene.hear(Heartbeat)

    play(script)


def test_hello_is_repeated_until_it_is_answered(play) -> None:
    async def script(scene: Scene) -> None:
        await scene.hear(Hello)
        await scene.hear(Hello)
        scene.say(Refused(reason="full", retry=True))
        await scene.welcome()
        await scene.hear(Heartbeat)

    play(script)


def test_a_member_outlives_its_planner_and_takes_the_heirs_view(play) -> None:
    async def script(scene: Scene) -> None:
        await scene.welcome()
        await scene.hear(GetView)
        scene.say(View(version=9, members=(maker(1),)))
        await scene.views.get()
        scene.close_planner()
        scene.open_planner()
        await scene.welcome()
        await scene.hear(GetView)
        # The heir's clock, from which it numbers its views, may be behind.
        scene.say(View(version=2, members=(maker(2),)))
        assert (await scene.views.get()).version == 2
        scene.say(View(version=1, members=(maker(2),)))
        scene.say(View(version=3, members=(maker(2),)))
        assert (await scene.views.get()).version == 3

    play(script)


def test_a_late_answer_does_not_undo_a_broadcast(play) -> None:
    async def script(scene: Scene) -> None:
        await scene.welcome()
        await scene.hear(GetView)
        scene.say(View(version=4, members=(maker(1),)))
        assert (await scene.views.get()).version == 4
        await scene.hear(Heartbeat)
        scene.say(Unknown())
        await scene.welcome()
        await scene.hear(GetView)
        scene.say(View(version=3, members=(maker(1),)))
        scene.say(View(version=5, members=(maker(1),)))
        assert (await scene.views.get()).version == 5

    play(script)


def test_broadcasts_are_followed_to_a_new_address(play) -> None:
    async def script(scene: Scene) -> None:
        await scene.welcome()
        await scene.hear(Heartbeat)
        elsewhere: Publisher[View] = Publisher(scene.net, scene.address + ".other")
        scene.say(Welcome(protocol=1, heartbeat_ms=20, broadcast=elsewhere.address))
        version = 0
        while scene.views.empty():
            version += 1
            elsewhere.send(View(version=version, members=()))
            await scene.hear(Heartbeat)
        elsewhere.close()

    play(script)


def test_a_refusal_for_good_ends_the_member(play) -> None:
    async def script(scene: Scene) -> None:
        await scene.hear(Hello)
        scene.say(Refused(reason="another model"))
        await asyncio.Event().wait()

    with pytest.raises(RefusedByPlanner, match="another model") as caught:
        play(script)
    assert caught.value.reason == "another model"


def test_a_stopped_member_says_goodbye(run, net: Net, address: str) -> None:
    async def main() -> None:
        scene = Scene(net, address)
        running = asyncio.ensure_future(scene.member.run())
        await scene.welcome()
        await scene.hear(Heartbeat)
        running.cancel()
        assert await scene.hear(Goodbye) == Goodbye(id="expert-0", incarnation=5, reason="stopped")
        await asyncio.wait([running])
        assert running.cancelled()
        scene.close_planner()

    run(main())


def test_anyone_may_ask_for_the_status(run, net: Net, address: str) -> None:
    status = Status(
        mesh="m", model="d", view=View(version=1, members=()), ready=True, reason="",
        epoch=0, balancedness=1.0, tokens=0,
    )  # fmt: skip

    async def main() -> None:
        scene = Scene(net, address)
        asking = asyncio.ensure_future(request_status(scene.net, address, 10.0))
        await scene.hear(GetStatus)
        scene.say(status)
        assert await asking == status
        scene.close_planner()

    run(main())
