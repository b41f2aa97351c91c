"""The order of steps; that nothing is lost by them is in tests/fault/test_fleet.py."""

from __future__ import annotations

import asyncio

import pytest

from compose import fleet as fleet_module
from compose.control import OrderFailed, Restart, Scale
from compose.fleet import Fleet, Most
from compose.listeners import Listeners
from compose.processes import Recipe
from mesh.admin import PlannerRefused
from mesh.messages import Drain, Member, Placement, Status, View
from mesh.settings import MeshSettings, Settings

MOST = dict.fromkeys(("expert", "router", "gateway"), Most(4, "so it is"))


class Scene:
    """A crew and a planner that do at once what they are told, and a diary of it."""

    def __init__(self, **counts: int) -> None:
        settings = Settings(mesh=MeshSettings(**counts))
        self.recipe = Recipe(
            settings, config=None, overrides={}, python="py", parent_pid=1, cpus=range(6)
        )
        self.present = {spec.id: spec for spec in self.recipe.specs()}
        self.diary: list[str] = []
        self.drained: set[str] = set()
        self.sick: set[str] = set()
        self.crowded: set[str] = set()
        """Workers that cannot drain."""

    # the crew

    def specs(self):
        return list(self.present.values())

    def missing(self, status, ids):
        return {id_: "loading" for id_ in ids if id_ in self.sick}

    def hire(self, spec):
        self.diary.append(f"hire {spec.id}")
        self.present[spec.id] = spec

    async def dismiss(self, id_):
        self.diary.append(f"dismiss {id_}")
        del self.present[id_]

    async def renew(self, id_, spec=None):
        self.diary.append(f"renew {id_}")
        self.drained.discard(id_)

    # the planner

    async def ask(self, question, want, *, timeout_s=None):
        if isinstance(question, Drain):
            if question.member in self.crowded and not question.undo:
                raise PlannerRefused("no room")
            self.diary.append(f"{'undo' if question.undo else 'drain'} {question.member}")
            (self.drained.discard if question.undo else self.drained.add)(question.member)
            return None
        members = tuple(
            Member(id=s.id, role=s.role, incarnation=1, pid=1, host="h", state="ready")
            for s in self.specs()
        )
        ranks = tuple(m.id for m in members if m.role == "expert" and m.id not in self.drained)
        placement = Placement(
            epoch=1, moe_layers=(1,), num_experts=1, ranks=ranks,
            slots_per_rank=(1,) * len(ranks), physical_to_logical=((0,) * len(ranks),),
        )  # fmt: skip
        return Status(
            mesh="m", model="m", view=View(version=1, members=members, placement=placement),
            ready=True, reason="", epoch=1, balancedness=1.0, tokens=0,
        )  # fmt: skip

    def do(self, order) -> list[str]:
        """The diary of carrying ``order`` out; raises ``OrderFailed``."""
        self.diary.clear()

        async def main() -> None:
            with Listeners("127.0.0.1", 0) as listeners:
                await Fleet(self, self, self.recipe, listeners, MOST, lambda specs: None).carry_out(
                    order, lambda text: None
                )

        asyncio.run(main())
        return self.diary


def test_what_is_new_is_there_before_anything_leaves_and_workers_are_empty_before_they_go():
    scene = Scene(experts=3, routers=1)
    assert scene.do(Scale(counts={"expert": 1, "router": 2})) == [
        "hire router-1",
        "drain expert-1", "drain expert-2", "dismiss expert-1", "dismiss expert-2",
    ]  # fmt: skip
    assert scene.recipe.counts == {"planner": 1, "expert": 1, "router": 2, "gateway": 1}
    assert scene.do(Scale(counts={"router": 2})) == []


def test_new_workers_take_their_part_of_the_cpus_among_all_that_are_to_be():
    scene = Scene(experts=2)
    scene.do(Scale(counts={"expert": 3}))
    assert [scene.present[f"expert-{index}"].argv[-1] for index in range(3)] == [
        "0-2", "3-5", "4-5",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ({"expert": 5}, "experts=5: expected 1 to 4: so it is"),
        ({"router": 0}, "routers=0: expected 1 to 4"),
        ({"planner": 2}, "planners cannot be scaled; expected experts, routers, gateways"),
    ],
)
def test_impossible_counts_are_refused_and_change_nothing(counts, words):
    scene = Scene()
    with pytest.raises(OrderFailed, match=words):
        scene.do(Scale(counts=counts))
    assert scene.diary == []


def test_workers_for_whose_experts_there_is_no_room_stay():
    scene = Scene(experts=3)
    scene.crowded = {"expert-2"}
    with pytest.raises(OrderFailed, match="no room"):
        scene.do(Scale(counts={"expert": 1}))
    assert scene.diary == ["drain expert-1", "undo expert-1"]
    assert "expert-2" in scene.present
    assert scene.recipe.counts["expert"] == 3


def test_new_processes_that_do_not_get_ready_are_let_go(monkeypatch):
    monkeypatch.setattr(fleet_module, "_STUCK_S", 0.0)
    scene = Scene()
    scene.sick = {"router-1"}
    with pytest.raises(OrderFailed, match=r"waiting for router-1 \(loading\)"):
        scene.do(Scale(counts={"router": 2}))
    assert scene.diary == ["hire router-1", "dismiss router-1"]
    assert scene.recipe.counts["router"] == 1


def test_a_rolling_restart_stands_in_for_whoever_is_alone():
    assert Scene(experts=2, routers=1).do(Restart()) == [
        "renew planner",
        "drain expert-0", "renew expert-0",
        "drain expert-1", "renew expert-1",
        "hire router-1", "renew router-0", "dismiss router-1",
        "hire gateway-1", "renew gateway-0", "dismiss gateway-1",
    ]  # fmt: skip


def test_a_worker_is_stood_in_for_where_the_others_have_no_room():
    scene = Scene(experts=2)
    scene.crowded = {"expert-0"}
    hire = scene.hire

    def with_room(spec):
        hire(spec)
        scene.crowded.clear()

    scene.hire = with_room
    assert scene.do(Restart(members=("expert-0",))) == [
        "hire expert-2", "drain expert-0", "renew expert-0", "drain expert-2", "dismiss expert-2",
    ]  # fmt: skip


def test_only_processes_that_run_here_are_started_again():
    with pytest.raises(OrderFailed, match="expert-9 does not run here; expected one of planner"):
        Scene().do(Restart(members=("router-0", "expert-9")))
