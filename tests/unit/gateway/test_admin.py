"""/admin through a real gateway; the planner's answers are the test's own."""

import json
import urllib.error
import urllib.request

import pytest

from mesh.messages import (
    AdminRefused,
    GetLoad,
    GetPlan,
    GetStatus,
    LoadDetail,
    Member,
    Pin,
    Placement,
    PlanDetail,
    Propose,
    Rebalance,
    RecordDetail,
    RecordedAt,
    RecordLoad,
    SetMode,
    Status,
    View,
)

# Two ranks with two experts each and a spare slot; rank-2 has come and holds nothing yet.
PLACEMENT = Placement(
    epoch=7,
    moe_layers=(1, 3),
    num_experts=4,
    ranks=("expert-0", "expert-1"),
    slots_per_rank=(3, 3),
    physical_to_logical=((0, 1, -1, 2, -1, 3), (3, -1, 2, 1, 0, -1)),
)
PACKED = [[0, 1, 2, 3], [3, 2, 1, 0]]
PLAN = PlanDetail(mode="advise", policy="mesh", epoch=7, verdict="advised", reason="1 < 2")


def status(placement=PLACEMENT, experts=("expert-0", "expert-1")):
    members = tuple(
        Member(id=name, role="expert", incarnation=1, pid=1, host="h", state="ready")
        for name in experts
    )
    return Status(
        mesh="m", model="tales", view=View(version=1, members=members, placement=placement),
        ready=True, reason="", epoch=7, balancedness=1.0, tokens=0,
    )  # fmt: skip


@pytest.fixture
def planner(mesh):
    mesh.planner.answers = dict.fromkeys((GetPlan, Rebalance, SetMode, Pin, Propose), PLAN)
    mesh.planner.answers[GetStatus] = status()
    mesh.planner.asked.clear()
    return mesh.planner


def ask(mesh, method, path, body=None):
    """(status, headers, JSON)."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(mesh.url + path, data, method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, response.headers, json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, error.headers, json.loads(error.read())


def told(planner):
    """What reached the planner, but for the gateway's looks at what is in force."""
    return [message for message in planner.asked if not isinstance(message, GetStatus)]


def test_what_is_in_force_is_shown_and_what_was_shown_can_be_posted(mesh, planner):
    code, _, shown = ask(mesh, "GET", "/admin/placement")
    assert code == 200
    assert shown["epoch"] == 7
    assert shown["ranks"] == ["expert-0", "expert-1"]
    assert shown["slots_per_rank"] == [3, 3]
    assert shown["physical_to_logical"] == [list(row) for row in PLACEMENT.physical_to_logical]
    code, _, answer = ask(mesh, "POST", "/admin/placement", shown)
    assert code == 200, answer
    assert told(planner) == [
        Propose(
            ranks=PLACEMENT.ranks,
            slots_per_rank=(2, 2),
            physical_to_logical=tuple(map(tuple, PACKED)),
        )
    ]


def test_sglangs_format_has_a_row_for_each_layer_of_the_model_and_comes_back(mesh, planner):
    code, _, shown = ask(mesh, "GET", "/admin/placement?format=sglang")
    assert code == 200
    rows = shown["physical_to_logical_map"]
    assert len(rows) == 4
    assert [rows[1], rows[3]] == PACKED
    for body in (shown, {"physical_to_logical_map": PACKED}):
        assert ask(mesh, "POST", "/admin/placement", body)[0] == 200
    first, second = told(planner)
    assert first == second
    assert first.physical_to_logical == tuple(map(tuple, PACKED))


def test_a_map_of_other_size_is_dealt_out_over_the_workers_that_are_there(mesh, planner):
    planner.answers[GetStatus] = status(experts=("expert-2", "expert-1", "expert-0"))
    wide = [[0, 1, 2, 3, 0, 1, 2], [3, 2, 1, 0, 3, 2, 1]]
    assert ask(mesh, "POST", "/admin/placement", {"physical_to_logical_map": wide})[0] == 200
    (proposal,) = told(planner)
    assert proposal.ranks == ("expert-0", "expert-1", "expert-2")
    assert proposal.slots_per_rank == (3, 2, 2)


def test_questions_reach_the_planner_and_its_answers_the_client(mesh, planner):
    planner.answers[GetLoad] = LoadDetail(
        window_s=60.0, moe_layers=(1,), ranks=("expert-0",), prefill=((1, 2),), decode=((3, 4),),
        rank_tokens=((10,),), balancedness=(1.0,), overall=1.0,
    )  # fmt: skip
    planner.answers[RecordLoad] = RecordDetail(
        routers=(RecordedAt(router="router-0", recording=True, steps=9),)
    )
    code, _, load = ask(mesh, "GET", "/admin/load")
    assert (code, load["prefill"], load["decode"]) == (200, [[1, 2]], [[3, 4]])
    code, _, plan = ask(mesh, "GET", "/admin/plan")
    assert (code, plan["verdict"], plan["reason"]) == (200, "advised", "1 < 2")
    assert plan["gain_s"] == 0.0  # fields at their default are there, too
    for path, body in (
        ("/admin/rebalance", b""),
        ("/admin/rebalance", {"force": True}),
        ("/admin/mode", {"mode": "off"}),
        ("/admin/pin", {"layer": 3, "expert": 0, "ranks": ["expert-1"]}),
    ):
        assert ask(mesh, "POST", path, body)[0] == 200
    code, _, record = ask(mesh, "POST", "/admin/record/start", b"")
    assert (code, record["routers"][0]["steps"]) == (200, 9)
    assert told(planner)[2:] == [
        Rebalance(force=False),
        Rebalance(force=True),
        SetMode(mode="off"),
        Pin(layer=3, expert=0, ranks=("expert-1",)),
        RecordLoad(action="start"),
    ]


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("/admin/mode", {"mode": "on"}, "mode", "'on'; expected one of off, advise, auto"),
        ("/admin/mode", {"mode": 1}, "mode", "Expected `str`"),
        ("/admin/mode", {}, "mode", "mode"),
        ("/admin/mode", b"{", None, "JSON"),
        ("/admin/rebalance", {"forced": True}, "forced", "forced"),
        ("/admin/pin", {"layer": 2, "expert": 0, "ranks": []}, "layer", "1, 3"),
        ("/admin/pin", {"layer": 1, "expert": 4, "ranks": []}, "expert", "0 to 3"),
        ("/admin/placement", {}, "physical_to_logical", "either"),
        ("/admin/placement", {"physical_to_logical": PACKED}, "ranks", "needs ranks"),
        ("/admin/placement", {"physical_to_logical_map": [[0]] * 3}, None, "at least 4"),
        ("/admin/placement", {"physical_to_logical_map": [[0, 1, 2, 4]] * 2}, None, "-1 (empty)"),
        ("/admin/placement", {"physical_to_logical_map": [[0, 1, 2, 2]] * 2}, None, "expert 3"),
        ("/admin/placement", {"physical_to_logical_map": [[0, 1, 2, 3], [0]]}, None, "layer 3"),
        (
            "/admin/placement",
            {"physical_to_logical": PACKED, "ranks": ["expert-0"], "slots_per_rank": [3]},
            None,
            "layer 1 has 4 slots",
        ),
        ("/admin/placement", {"physical_to_logical_map": PACKED, "num_experts": 8}, None, "4"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_400_with_the_reason_and_never_reaches_the_planner(
    mesh, planner, path, body, param, words
):
    code, _, answer = ask(mesh, "POST", path, body)
    assert code == 400
    error = answer["error"]
    assert error["type"] == "invalid_request_error"
    assert words in error["message"]
    if param:
        assert error["param"] == param
    assert told(planner) == []


def test_workers_and_pages_that_are_not_there_are_404(mesh, planner):
    code, _, answer = ask(
        mesh, "POST", "/admin/pin", {"layer": 1, "expert": 0, "ranks": ["expert-9"]}
    )
    assert (code, answer["error"]["code"]) == (404, "rank_not_found")
    assert ask(mesh, "POST", "/admin/record/begin", b"")[0] == 404
    assert ask(mesh, "GET", "/admin/nothing")[0] == 404
    assert ask(mesh, "GET", "/admin/placement?format=yaml")[0] == 400
    assert ask(mesh, "GET", "/admin/rebalance")[0] == 405
    assert told(planner) == []


def test_what_the_planner_refuses_is_409_with_its_words(mesh, planner):
    planner.answers[Rebalance] = AdminRefused(reason="the mode is off")
    code, _, answer = ask(mesh, "POST", "/admin/rebalance", {})
    assert code == 409
    assert answer["error"]["code"] == "refused_by_planner"
    assert answer["error"]["message"] == "the mode is off."


def test_before_the_first_placement_and_without_a_planner_it_is_503(mesh, planner):
    planner.answers[GetStatus] = status(placement=None)
    code, headers, answer = ask(mesh, "GET", "/admin/placement")
    assert (code, answer["error"]["code"]) == (503, "not_ready")
    assert int(headers["Retry-After"]) > 0
    del planner.answers[GetPlan]  # as if it hung
    code, headers, answer = ask(mesh, "GET", "/admin/plan")
    assert (code, answer["error"]["code"]) == (503, "planner_unavailable")
    assert int(headers["Retry-After"]) > 0
