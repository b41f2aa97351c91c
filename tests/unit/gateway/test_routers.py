import pytest

from gateway.affinity import PrefixTable
from gateway.routers import HUNG_S, QUIET_S, Routers
from mesh.messages import Load, Member, Pong, View

PROMPT = tuple(range(64))


def member(id_, **changes):
    fields = {
        "id": id_,
        "role": "router",
        "incarnation": 1,
        "pid": 1,
        "host": "h",
        "state": "ready",
        "control": f"ipc:///{id_}",
    }
    return Member(**(fields | changes))


def view(version, *members):
    return View(version=version, members=members)


def pong(id_, *, ready=True, reason="", running=0, incarnation=1):
    return Pong(
        router=id_,
        incarnation=incarnation,
        ready=ready,
        reason=reason,
        load=Load(running=running),
    )


@pytest.fixture
def routers():
    """Two connected routers that take work."""
    table = Routers(PrefixTable(), max_running=64, slack=8)
    table.apply(view(1, member("r0"), member("r1")))
    for id_ in ("r0", "r1"):
        table.link_changed(id_, up=True, now=0.0)
        assert table.pong(id_, pong(id_), 0.0)
    return table


def test_the_idlest_takes_the_work(routers):
    routers.taken("r0", ())
    assert routers.pick(PROMPT) == "r1"
    routers.left("r0")
    routers.taken("r1", ())
    assert routers.pick(PROMPT) == "r0"


def test_other_gateways_work_counts(routers):
    routers.pong("r0", pong("r0", running=9), 0.0)
    assert routers.pick(PROMPT) == "r1"


def test_a_cached_prefix_wins_until_its_router_is_much_busier(routers):
    routers.taken("r1", PROMPT)
    assert routers.pick(PROMPT) == "r1"
    for _ in range(4):
        routers.taken("r1", ())
    assert routers.pick(PROMPT) == "r0"


def test_an_excluded_router_is_not_picked(routers):
    assert routers.pick(PROMPT, {"r0"}) == "r1"
    assert routers.pick(PROMPT, {"r0", "r1"}) is None


def test_draining_and_unready_routers_take_no_work(routers):
    routers.apply(view(2, member("r0", state="draining"), member("r1")))
    routers.pong("r1", pong("r1", ready=False, reason="no expert for layer 3"), 0.0)
    assert routers.pick(PROMPT) is None
    assert "r1: no expert for layer 3" in routers.why_not_ready()


def test_views_say_whom_to_connect_and_whom_to_drop(routers):
    newer = view(2, member("r1", incarnation=2), member("r2"), member("e0", role="expert"))
    added, gone = routers.apply(newer)
    assert sorted(m.id for m in added) == ["r1", "r2"]
    assert sorted(gone) == ["r0", "r1"]
    assert routers.apply(newer) == ([], [])


def test_a_smaller_version_counts_too(routers):
    # Of a planner that restarted with its clock set back; mesh.member has judged it.
    assert routers.apply(view(9, member("r0"), member("r1"))) == ([], [])
    assert routers.apply(view(3, member("r1")))[1] == ["r0"]
    assert routers.pick(PROMPT) == "r1"


def test_the_answer_of_a_replaced_process_does_not_count(routers):
    assert not routers.pong("r0", pong("r0", incarnation=2), 1.0)
    assert not routers.pong("r1", pong("r0"), 1.0)
    assert routers.pick(PROMPT) is None
    assert "r0: another process answers" in routers.why_not_ready()
    added, gone = routers.apply(view(2, member("r0", incarnation=2)))
    assert ([m.id for m in added], sorted(gone)) == (["r0"], ["r0", "r1"])
    routers.link_changed("r0", up=True, now=1.0)
    assert routers.pong("r0", pong("r0", incarnation=2), 1.0)


def test_a_refusal_counts_until_the_next_answer(routers):
    routers.refused("r0", "the router is stopping")
    assert routers.pick(PROMPT, {"r1"}) is None
    assert routers.pong("r0", pong("r0"), 1.0)
    assert routers.pick(PROMPT, {"r1"}) == "r0"


def test_a_dead_member_is_gone(routers):
    assert routers.apply(view(2, member("r0", state="dead"), member("r1")))[1] == ["r0"]


def test_silence_is_noticed_once_and_ends_with_an_answer(routers):
    routers.heard("r1", QUIET_S)
    assert routers.silent(QUIET_S + 0.1) == (["r0"], [])
    assert routers.silent(QUIET_S + 0.2) == ([], [])
    assert routers.pick(PROMPT) == "r1"
    routers.heard("r1", HUNG_S)
    assert routers.silent(HUNG_S + 0.1) == ([], ["r0"])
    assert routers.silent(HUNG_S + 0.2) == ([], [])
    assert routers.pong("r0", pong("r0"), HUNG_S + 1)
    assert routers.why_not_ready() == ""
    assert routers.silent(2 * HUNG_S + 2) == (["r0", "r1"], ["r0", "r1"])


@pytest.mark.parametrize(
    ("views", "reason"),
    [
        ([], "the planner has not answered yet"),
        ([view(1)], "no router has joined the mesh"),
        ([view(1, member("r0", state="loading", detail="reading weights"))], "r0: reading weights"),
        ([view(1, member("r0"))], "r0: has not answered yet"),
    ],
)
def test_why_not_ready_says_what_is_missing(views, reason):
    table = Routers(PrefixTable(), max_running=64, slack=8)
    for snapshot in views:
        table.apply(snapshot)
    assert table.why_not_ready() == reason


def full(running, waiting, free):
    load = Load(running=running, waiting=waiting, kv_blocks_total=100, kv_blocks_free=free)
    return Pong(router="r0", incarnation=1, ready=True, reason="", load=load)


def test_room_is_what_the_ready_routers_run_and_a_little_more(routers):
    assert routers.room() == 2 * (64 + 8)
    for _ in range(10):
        routers.taken("r0", ())
    assert routers.room() == 2 * 72 - 10
    routers.pong("r1", pong("r1", ready=False, reason="loads"), 0.0)
    assert routers.room() == 72 - 10


def test_busy_gateways_share_a_router(routers):
    two = [member(f"g{i}", role="gateway") for i in range(2)]
    routers.apply(view(2, member("r0"), *two))
    routers.pong("r0", pong("r0", running=10), 0.0)
    assert routers.room() == 54 + 8
    routers.pong("r0", pong("r0", running=60), 0.0)
    assert routers.room() == 32 + 8


def test_a_router_without_kv_blocks_runs_no_more_than_it_does(routers):
    routers.apply(view(2, member("r0")))
    routers.pong("r0", full(20, 30, 60), 0.0)
    assert routers.room() == 64 + 8
    routers.pong("r0", full(20, 30, 5), 0.0)
    assert routers.room() == 20 + 8
    routers.pong("r0", full(20, 0, 5), 0.0)
    assert routers.room() == 28 + 8
