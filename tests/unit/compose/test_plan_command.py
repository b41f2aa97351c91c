"""``moemesh plan`` against a planner whose answers are the test's."""

import asyncio
import json
import re
import threading
import time
from contextlib import suppress

import pytest

from compose.cli import main
from mesh.links import LinkClosed, Net, ServerLink
from mesh.messages import (
    AdminRefused,
    FromPlanner,
    GetLoad,
    GetPlan,
    GetStatus,
    LoadDetail,
    Member,
    Pin,
    PinDetail,
    Placement,
    PlanDetail,
    Propose,
    Rebalance,
    RecordDetail,
    RecordedAt,
    RecordLoad,
    SetMode,
    Status,
    ToPlanner,
    View,
)

PLACEMENT = Placement(
    epoch=7,
    moe_layers=(1,),
    num_experts=3,
    ranks=("expert-0", "expert-1"),
    slots_per_rank=(3, 2),
    physical_to_logical=((0, -1, 1, 2, 0),),
)
PLAN = PlanDetail(
    mode="auto", policy="mesh", epoch=7, planned_at=time.time() - 9, balancedness_before=0.8125,
    balancedness_after=0.9375, moves=6, gain_s=3.25, cost_s=0.5, verdict="moving",
    reason="gain 3.25 s exceeds cost 0.5 s", phase="loading", moved=2, to_move=6,
    faults=("layer 1 slot 2: checksum",), pins=(PinDetail(layer=1, expert=2, ranks=("expert-1",)),),
)  # fmt: skip
LOAD = LoadDetail(
    window_s=60.0, moe_layers=(1,), ranks=("expert-0", "expert-1"), prefill=((10, 20, 0),),
    decode=((6, 0, 4),), rank_tokens=((25, 15),), balancedness=(0.8,), overall=0.8,
)  # fmt: skip


RECORDED = f"/run/{'a-long-name/' * 20}loads.safetensors"


class Desk:
    """A planner's command socket on a thread; ``answers`` by the type of the question."""

    def __init__(self, run_dir):
        members = tuple(
            Member(id=name, role="expert", incarnation=1, pid=1, host="h", state="ready")
            for name in PLACEMENT.ranks
        )
        view = View(version=1, members=members, placement=PLACEMENT)
        self.answers = dict.fromkeys((GetPlan, Rebalance, SetMode, Pin, Propose), PLAN) | {
            GetLoad: LOAD,
            GetStatus: Status(
                mesh="m", model="demo", view=view, ready=True, reason="", epoch=7,
                balancedness=0.8, tokens=40, mode="auto", phase="loading", alarms=("stuck",),
                moving="rebalance", moved=2, to_move=6,
            ),
            RecordLoad: RecordDetail(routers=(RecordedAt(
                router="router-0", recording=False, steps=9, path=RECORDED),)),
        }  # fmt: skip
        self.asked = []
        self.address = f"ipc://{run_dir}/planner.sock"
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_until_complete, args=(self.serve(),))
        self.listening = threading.Event()

    async def serve(self):
        net = Net()
        self.link = ServerLink[ToPlanner, FromPlanner](net, self.address, receives=ToPlanner)
        self.listening.set()
        with suppress(LinkClosed):
            while True:
                peer, message = await self.link.recv()
                self.asked.append(message)
                self.link.send(peer, self.answers[type(message)])
        net.close()

    def __enter__(self):
        self.thread.start()
        assert self.listening.wait(10)
        return self

    def __exit__(self, *error):
        self.loop.call_soon_threadsafe(self.link.close)
        self.thread.join(10)
        self.loop.close()


@pytest.fixture
def moemesh(monkeypatch, capsys, tmp_path):
    """Runs the command in this process; returns exit code, standard output and error."""
    monkeypatch.setenv("MOEMESH_MESH_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "40")  # of a terminal, which standard output is not

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["moemesh", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return run


@pytest.fixture
def desk(tmp_path):
    with Desk(tmp_path) as desk:
        yield desk


def test_a_plan_is_shown_with_its_numbers_and_the_move_under_way(moemesh, desk):
    code, out, _ = moemesh("plan", "show")
    assert code == 0
    for words in ("auto", "0.812 -> 0.938", "3.25 s", "0.5 s", "exceeds cost", "2 of 6 slots",
                  "checksum", "layer 1 expert 2 on expert-1"):  # fmt: skip
        assert words in out
    code, out, _ = moemesh("plan", "show", "--json")
    assert json.loads(out)["faults"] == ["layer 1 slot 2: checksum"]
    assert json.loads(out)["retry_in_s"] == 0.0


def test_the_load_is_shown_per_layer_and_rank(moemesh, desk):
    code, out, _ = moemesh("plan", "load")
    assert code == 0
    row = re.split(r"  +", out.splitlines()[-1].strip())
    # the hottest expert has 20 of 40 tokens on 3 experts
    assert row == ["1", "30", "10", "1 (1.50 x mean)", "expert-0 25", "expert-1 15", "0.800",
                   "25.0%"]  # fmt: skip
    code, out, _ = moemesh("plan", "load", "--json")
    assert json.loads(out)["rank_tokens"] == [[25, 15]]


def test_each_command_asks_the_planner_for_what_it_says(moemesh, desk):
    for arguments, question in (
        (("rebalance",), Rebalance()),
        (("rebalance", "--force"), Rebalance(force=True)),
        (("mode", "advise"), SetMode(mode="advise")),
        (("pin", "1", "2", "expert-0", "expert-1"),
         Pin(layer=1, expert=2, ranks=("expert-0", "expert-1"))),
        (("unpin", "1", "2"), Pin(layer=1, expert=2, ranks=())),
        (("record", "dump"), RecordLoad(action="dump")),
    ):  # fmt: skip
        assert moemesh("plan", *arguments)[0] == 0
        assert desk.asked[-1] == question
    assert RECORDED in moemesh("plan", "record", "stop")[1]


@pytest.mark.parametrize("format_", ["moemesh", "sglang"])
def test_what_was_exported_can_be_applied(moemesh, desk, tmp_path, format_):
    code, out, _ = moemesh("plan", "export", "--format", format_)
    assert code == 0
    if format_ == "sglang":
        assert json.loads(out) == {"physical_to_logical_map": [[0, 1, 2, 0], [0, 1, 2, 0]]}
    file = tmp_path / "placement.json"
    file.write_text(out)
    assert moemesh("plan", "apply", str(file))[0] == 0
    assert desk.asked[-1] == Propose(
        ranks=("expert-0", "expert-1"), slots_per_rank=(2, 2), physical_to_logical=((0, 1, 2, 0),)
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "no placement"),
        ("{", "no placement"),
        ('{"physical_to_logical_map": [[0, 1, 1]]}', "no slot for expert 2"),
        ('{"physical_to_logical_map": [[0, 1, 3]]}', "expected -1 (empty) to 2"),
    ],
)
def test_a_file_that_is_no_placement_of_this_model_is_refused_by_name(
    moemesh, desk, tmp_path, text, words
):
    file = tmp_path / "placement.json"
    file.write_text(text)
    code, _, err = moemesh("plan", "apply", str(file))
    assert code == 2
    assert str(file) in err
    assert words in err
    assert not any(isinstance(message, Propose) for message in desk.asked)


def test_refusals_and_silence_end_with_1_and_the_reason(moemesh, desk):
    desk.answers[Rebalance] = AdminRefused(reason="the mode is off")
    code, _, err = moemesh("plan", "rebalance")
    assert (code, "the mode is off" in err) == (1, True)
    code, _, err = moemesh(
        "plan", "show", "--timeout", "0.1", "--set", "mesh.planner=ipc:///nowhere/planner.sock"
    )
    assert (code, "no planner answers" in err) == (1, True)
    code, _, err = moemesh("plan", "pin", "1", "2")
    assert (code, "at least one" in err) == (2, True)


def test_status_shows_mode_phase_and_alarms(moemesh, desk):
    code, out, _ = moemesh("status", "--once")
    assert code == 0
    for words in ("plans auto", "moving experts: rebalance, 2 of 6 done, loading", "alarm: stuck"):
        assert words in out
    told = json.loads(moemesh("status", "--json")[1])
    assert (told["mode"], told["phase"], told["alarms"]) == ("auto", "loading", ["stuck"])
