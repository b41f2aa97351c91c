import io
import json

import msgspec
from rich.console import Console

from compose.status_view import document, render
from mesh.messages import Load, Member, Placement, Status, View


def member(name: str, role: str, **more) -> Member:
    return Member(
        id=name, role=role, incarnation=5, pid=42, host="h", **({"state": "ready"} | more)
    )


STATUS = Status(
    mesh="default",
    model="demo",
    view=View(
        version=9,
        members=(
            member("router-0", "router", group=(43, 44),
                   load=Load(running=3, waiting=1, kv_blocks_total=10, kv_blocks_free=5,
                             resident_bytes=2**20)),
            member("expert-0", "expert", state="loading", progress=0.25, detail="reading"),
        ),
        placement=Placement(epoch=4, moe_layers=(1, 2), num_experts=4, ranks=("expert-0",),
                            slots_per_rank=(4,), physical_to_logical=((0, 1, 2, 3),) * 2),
    ),
    ready=False,
    reason="expert-0 is loading",
    epoch=4,
    balancedness=0.5,
    tokens=17,
)  # fmt: skip


def test_json_has_every_field_of_every_member_even_at_its_default():
    told = json.loads(msgspec.json.encode(document(STATUS)))
    router, expert = told["members"]
    wanted = {"id", "role", "pid", "host", "state", "incarnation", "progress", "detail"}
    assert wanted <= router.keys()
    assert router["load"]["running"] == 3
    assert router["group"] == [43, 44]
    assert router["load"]["lane_slots_in_use"] == 0
    assert expert["load"] is None
    assert expert["slots_per_layer"] == 4
    assert told["epoch"] == 4
    assert told["placement"]["physical_to_logical"] == [[0, 1, 2, 3]] * 2


def test_table_shows_states_queues_slots_and_why_the_mesh_is_not_ready():
    out = io.StringIO()
    Console(file=out, width=200).print(render(STATUS))
    text = out.getvalue()
    for word in (
        "expert-0 is loading",
        "loading 25%",
        "2x4",
        "50%",
        "1 MiB",
        "reading",
        "43",
        "44",
    ):
        assert word in text
