import asyncio

import pytest

from gateway.affinity import PrefixTable
from gateway.errors import (
    ApiError,
    GenerationFailed,
    InvalidValue,
    Overloaded,
    RateLimited,
    Unavailable,
)
from gateway.routers import Routers
from gateway.sequences import Mailbox, Sequence, SequenceTable
from gateway.tenants import Limits, Tenant
from mesh.messages import (
    Cancel,
    Delta,
    Load,
    Logprob,
    Member,
    Pong,
    Rejected,
    Sampling,
    Submit,
    Tokens,
    View,
)

TENANT = Tenant("t")


class World:
    """A sequence table over routers that only record what they are sent."""

    def __init__(self, *ids, max_running=64):
        self.routers = Routers(PrefixTable(), max_running=max_running, slack=1)
        self.sent = []
        self.deaf = set()
        self.table = SequenceTable(self.routers, self.send, router_wait_s=10.0)
        self.mailbox = Mailbox()
        self.version = 0
        self.set_routers(*ids)

    def send(self, router, message):
        if router in self.deaf:
            return False
        self.sent.append((router, message))
        return True

    def set_routers(self, *ids):
        self.version += 1
        members = tuple(
            Member(
                id=id_,
                role="router",
                incarnation=1,
                pid=1,
                host="h",
                state="ready",
                control="ipc:///x",
            )
            for id_ in ids
        )
        self.routers.apply(View(version=self.version, members=members))
        for id_ in ids:
            self.routers.link_changed(id_, up=True, now=0.0)
            self.answers(id_)

    def open(self, now=0.0, *, id_="s", tenant=TENANT, priority=0, **sampling):
        sequence = Sequence(
            id_=id_,
            choice=0,
            prompt=(1, 2, 3),
            sampling=Sampling(**sampling),
            trace="t",
            mailbox=self.mailbox,
            deadline=600.0,
            tenant=tenant,
            priority=priority,
        )
        self.table.open(sequence, now)
        return sequence

    def refuse(self, now=0.0, **fields):
        name = self.submits()[-1].request
        self.table.on_rejected(Rejected(request=name, **fields), now)

    def answers(self, id_):
        """``id_`` says that it is ready."""
        pong = Pong(router=id_, incarnation=1, ready=True, reason="", load=Load())
        return self.routers.pong(id_, pong, 0.0)

    def answers_again(self, id_):
        self.routers.link_changed(id_, up=True, now=100.0)
        self.answers(id_)

    def tokens(self, *tokens, now=0.0, request=None, **fields):
        name = request or self.submits()[-1].request
        delta = Delta(request=name, tokens=tokens, **fields)
        self.table.on_tokens(Tokens(step=1, deltas=(delta,)), now)

    def submits(self):
        return [message for _, message in self.sent if isinstance(message, Submit)]

    def received(self):
        """All that the consumer can read now; an error comes last."""

        async def read():
            found = []
            try:
                while True:
                    async with asyncio.timeout(0):
                        found += [list(delta.tokens) for _, delta in await self.mailbox.get()]
            except TimeoutError:
                return found
            except ApiError as error:
                return [*found, error]

        return asyncio.run(read())


def test_tokens_reach_their_sequence_and_the_end_forgets_it():
    world = World("r0")
    world.open()
    world.tokens(5)
    world.tokens(6, finish="length")
    world.tokens(7)
    assert world.received() == [[5], [6]]
    assert len(world.table) == 0


def test_closing_cancels_on_the_router():
    world = World("r0")
    sequence = world.open()
    world.table.close([sequence], 0.0)
    name = world.submits()[0].request
    assert world.sent[-1] == ("r0", Cancel(requests=(name,)))
    world.table.close([sequence], 0.0)
    assert len(world.sent) == 2


def test_a_finished_sequence_is_not_cancelled():
    world = World("r0")
    sequence = world.open()
    world.tokens(5, finish="stop")
    world.table.close([sequence], 0.0)
    assert len(world.sent) == 1


def test_a_lost_router_hands_over_without_gap_or_repeat():
    world = World("r0", "r1")
    world.open(prompt_logprobs=0)
    first = world.submits()[0]
    world.tokens(5, prompt_logprobs=(None, Logprob(2, -1.0), Logprob(3, -1.0)))
    world.tokens(6)
    world.routers.link_changed("r0", up=False, now=1.0)
    world.table.on_router_lost("r0", 1.0)
    router, second = world.sent[-1]
    assert router == "r1"
    assert second.output == (5, 6)
    assert second.sampling.prompt_logprobs == -1
    assert second.deadline_ms == 600_000
    world.tokens(6, request=first.request)  # a late word of the lost router
    world.tokens(7, finish="length")
    assert world.received() == [[5], [6], [7]]


def test_a_quiet_router_keeps_what_can_go_nowhere_else():
    world = World("r0", "r1")
    world.open()
    world.tokens(5)
    first = world.submits()[-1]
    world.routers.refused("r0", "has not answered for 2 s")
    assert world.table.on_router_quiet("r0", 1.0) == 1
    router, second = world.sent[-1]
    assert (router, second.output) == ("r1", (5,))
    world.tokens(6, request=first.request)  # a late word of the quiet router
    world.routers.refused("r1", "has not answered for 2 s")
    assert world.table.on_router_quiet("r1", 2.0) == 0
    world.tokens(7, finish="length")
    assert world.received() == [[5], [7]]


def test_a_sequence_that_has_moved_often_stays_with_a_quiet_router():
    world = World("r0", "r1")
    sequence = world.open()
    moved = []
    for _ in range(4):
        here = sequence.router
        world.routers.refused(here, "has not answered for 2 s")
        moved.append(world.table.on_router_quiet(here, 1.0))
        world.answers(here)
    assert moved == [1, 1, 1, 0]


def test_without_another_router_it_waits_for_one():
    world = World("r0")
    world.open()
    world.tokens(5)
    world.set_routers()
    world.table.on_router_lost("r0", 1.0)
    assert world.table.waiting == 1
    world.set_routers("r2")
    world.table.place_waiting(5.0)
    assert world.sent[-1][0] == "r2"
    assert world.submits()[-1].output == (5,)


def test_waiting_ends_with_the_reason():
    world = World()
    world.open(now=3.0)
    world.table.place_waiting(12.9)
    assert world.table.waiting == 1
    world.table.place_waiting(13.0)
    (error,) = world.received()
    assert isinstance(error, Unavailable)
    assert "no router has joined" in error.message
    assert len(world.table) == 0


def test_a_router_that_cannot_be_sent_to_is_waited_for():
    world = World("r0")
    world.deaf.add("r0")
    world.open()
    assert world.table.waiting == 1
    world.deaf.clear()
    world.table.place_waiting(1.0)
    assert [router for router, _ in world.sent] == ["r0"]


def test_a_refusal_is_tried_elsewhere_first():
    world = World("r0", "r1")
    world.open()
    for expected in ("r0", "r1"):
        router, submit = world.sent[-1]
        assert router == expected
        world.table.on_rejected(
            Rejected(request=submit.request, reason="queue full", retry_after_s=2.5), 0.0
        )
    (error,) = world.received()
    assert isinstance(error, Overloaded)
    assert error.headers == {"Retry-After": "3"}


def test_a_moved_sequence_waits_out_a_refusal():
    world = World("r0")
    world.open()
    world.tokens(5)
    world.table.on_router_lost("r0", 1.0)
    world.refuse(2.0, reason="full", retry_after_s=1.0)
    assert world.table.waiting == 1
    world.table.place_waiting(300.0)
    assert world.submits()[-1].output == (5,)
    assert world.received() == [[5]]


def test_a_moved_sequence_waits_to_its_own_deadline():
    world = World("r0")
    world.open()
    world.tokens(5)
    world.set_routers()
    world.table.on_router_lost("r0", 1.0)
    world.table.place_waiting(599.0)
    assert world.table.waiting == 1
    world.table.place_waiting(600.0)
    tokens, error = world.received()
    assert tokens == [5]
    assert isinstance(error, Unavailable)


def test_a_router_that_is_not_ready_is_waited_for():
    world = World("r0")
    world.open()
    world.refuse(reason="the router is loading weights", retry_after_s=1.0, not_ready=True)
    world.table.place_waiting(1.0)
    assert (world.table.waiting, len(world.submits())) == (1, 1)
    assert world.answers("r0")
    world.table.place_waiting(2.0)
    assert len(world.submits()) == 2
    assert world.received() == []


def test_a_router_that_stays_unready_makes_503_with_its_reason():
    world = World("r0")
    world.open()
    world.refuse(reason="the router is stopping", retry_after_s=1.0, not_ready=True)
    world.table.place_waiting(10.0)
    (error,) = world.received()
    assert isinstance(error, Unavailable)
    assert "r0: the router is stopping" in error.message


def test_another_router_takes_what_one_is_not_ready_for():
    world = World("r0", "r1")
    world.open()
    world.refuse(reason="the router is stopping", retry_after_s=1.0, not_ready=True)
    assert [router for router, _ in world.sent] == ["r0", "r1"]


def test_a_refusal_for_good_is_the_clients_error():
    world = World("r0", "r1")
    world.open()
    world.table.on_rejected(Rejected(request=world.submits()[0].request, reason="too long"), 0.0)
    (error,) = world.received()
    assert isinstance(error, InvalidValue)
    assert error.message == "too long"


def test_an_error_of_the_mesh_follows_what_came_before():
    world = World("r0")
    world.open()
    world.tokens(5)
    world.tokens(finish="error", error="expert 3 of layer 2 is not served")
    tokens, error = world.received()
    assert tokens == [5]
    assert isinstance(error, GenerationFailed)
    assert "expert 3" in error.message


def test_missing_workers_ask_the_client_to_come_back():
    world = World("r0")
    world.open()
    world.tokens(finish="error", error="nobody serves expert 3", error_kind="unavailable")
    (error,) = world.received()
    assert isinstance(error, Unavailable)
    assert error.message == "nobody serves expert 3"
    assert int(error.headers["Retry-After"]) >= 1


def test_a_router_that_gave_a_sequence_up_is_asked_again():
    world = World("r0")
    world.open()
    world.tokens(5)
    world.tokens(finish="cancelled")
    assert world.submits()[-1].output == (5,)
    assert world.submits()[-1].request != world.submits()[0].request


def test_a_sequence_that_kills_routers_is_given_up():
    world = World("r0")
    world.open()
    for _ in range(20):
        world.table.on_router_lost("r0", 0.0)
    (error,) = world.received()
    assert isinstance(error, GenerationFailed)
    assert len(world.submits()) == 9


def test_one_consumer_waits_and_wakes():
    async def main():
        mailbox = Mailbox()
        async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(mailbox.get())
            await asyncio.sleep(0)
            mailbox.put(3, Delta(request="r", tokens=(1,)))
            mailbox.put(4, Delta(request="r", tokens=(2,)))
            assert [choice for choice, _ in await reading] == [3, 4]

    asyncio.run(main())


def test_the_first_failure_counts():
    async def main():
        mailbox = Mailbox()
        mailbox.fail(Unavailable("first"))
        mailbox.fail(Unavailable("second"))
        with pytest.raises(Unavailable, match="first"):
            await mailbox.get()

    asyncio.run(main())


# ---------------------------------------------------------------- taking turns


def names(world):
    return [submit.request.partition(".")[0] for submit in world.submits()]


def finish_oldest(world, done):
    world.tokens(5, finish="length", request=world.submits()[done].request)


def test_routers_get_what_they_can_run_and_the_rest_waits():
    world = World("r0", max_running=2)
    for i in range(5):
        world.open(id_=f"s{i}")
    assert names(world) == ["s0", "s1", "s2"]
    assert (len(world.table), world.table.waiting) == (5, 2)
    finish_oldest(world, 0)
    assert names(world)[3:] == ["s3"]


def test_a_flood_delays_another_tenant_by_one_turn():
    world = World("r0", max_running=2)
    for i in range(30):
        world.open(id_=f"flood{i}", tenant=Tenant("flood"))
    world.open(id_="mine", tenant=Tenant("newcomer"))
    for done in range(2):
        finish_oldest(world, done)
    assert "mine" in names(world)


def test_priority_orders_a_tenants_own():
    world = World("r0", max_running=1)
    for i, priority in enumerate((0, 0, 5, 1, -1)):
        world.open(id_=f"s{i}", priority=priority)
    for done in range(3):
        finish_oldest(world, done)
    assert names(world) == ["s0", "s1", "s4", "s3", "s2"]


def test_a_closed_sequence_loses_its_turn_and_makes_room():
    world = World("r0", max_running=1)
    first, *_ = [world.open(id_=f"s{i}") for i in range(3)]
    waiting = world.open(id_="s3")
    world.table.close([waiting], 0.0)
    assert world.table.waiting == 1
    world.table.close([first], 0.0)
    assert names(world) == ["s0", "s1", "s2"]
    assert world.table.waiting == 0


def test_waiting_for_a_turn_is_no_waiting_for_a_router():
    """However long the turn took, a mesh that is not ready for a moment refuses nobody."""
    world = World("r0", max_running=1)
    for i in range(3):
        world.open(id_=f"s{i}")
    world.table.place_waiting(100.0)
    world.routers.link_changed("r0", up=False, now=100.0)
    world.table.place_waiting(100.5)
    assert world.received() == []
    world.answers_again("r0")
    finish_oldest(world, 0)
    assert names(world)[2:] == ["s2"]


def test_without_a_router_those_whose_turn_has_not_come_are_told():
    world = World("r0", max_running=1)
    for i in range(3):
        world.open(id_=f"s{i}")
    world.routers.link_changed("r0", up=False, now=100.0)
    for now in (100.0, 109.0):
        world.table.place_waiting(now)
        assert world.received() == []
    world.table.place_waiting(110.0)
    (error,) = world.received()
    assert isinstance(error, Unavailable)


def test_tokens_are_charged_to_the_tenant_once():
    tenant = Tenant("t", Limits(tokens_per_minute=5))
    world = World("r0", "r1")
    world.open(tenant=tenant)  # a prompt of 3
    tenant.check(1, 0.0)
    world.tokens(7)
    world.routers.link_changed("r0", up=False, now=0.0)
    world.table.on_router_lost("r0", 0.0)
    tenant.check(1, 0.0)  # being run again is not the tenant's doing
    world.tokens(8)
    with pytest.raises(RateLimited):
        tenant.check(1, 0.0)


def test_time_without_a_router_ends_with_the_first_submit():
    world = World()
    sequence = world.open(now=5.0)
    assert not world.submits()
    world.set_routers("a", "b")
    world.table.place_waiting(8.0)
    assert sequence.queued_s == 3.0
    world.table.on_router_lost(sequence.router, 20.0)
    assert len(world.submits()) == 2
    assert sequence.queued_s == 3.0
