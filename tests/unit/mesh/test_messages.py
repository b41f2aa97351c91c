"""Bytes of every message, pinned: a changed byte is a broken neighbour version."""

from __future__ import annotations

import typing

import msgspec
import pytest

from mesh import messages as m

LOAD = m.Load(step=7, running=2, waiting=1, kv_blocks_total=64, kv_blocks_free=60, epoch=3)
PLACEMENT = m.Placement(
    epoch=3,
    moe_layers=(1, 2),
    num_experts=3,
    ranks=("expert-0", "expert-1"),
    slots_per_rank=(2, 1),
    physical_to_logical=((0, 1, 2), (2, -1, 0)),
)
MEMBER = m.Member(
    id="expert-0",
    role="expert",
    incarnation=1_700_000_000_000_000_001,
    pid=42,
    host="h",
    state="loading",
    lanes="/run/expert-0.lanes",
    progress=0.5,
    load=LOAD,
)
VIEW = m.View(version=9, members=(MEMBER,), placement=PLACEMENT, model_digest="d1")

GOLDEN: dict[str, tuple[object, bytes]] = {
    "Hello": (
        m.Hello(
            id="expert-0",
            role="expert",
            incarnation=5,
            pid=42,
            host="h",
            model_digest="d1",
            lanes="/run/expert-0.lanes",
            num_slots=3,
            placement=PLACEMENT,
        ),
        (
            b"\xde\x00\x0a\xa4type\xa5Hello\xa2id\xa8expert-0\xa4role\xa6expert\xabinc"
            b"arnation\x05\xa3pid*\xa4host\xa1h\xacmodel_digest\xa2d1\xa5la"
            b"nes\xb3/run/expert-0.lanes\xa9num_slots\x03\xa9place"
            b"ment\x86\xa5epoch\x03\xaamoe_layers\x92\x01\x02\xabnum_experts\x03\xa5"
            b"ranks\x92\xa8expert-0\xa8expert-1\xaeslots_per_rank\x92"
            b"\x02\x01\xb3physical_to_logical\x92\x93\x00\x01\x02\x93\x02\xff\x00"
        ),
    ),
    "Hello of a group": (
        m.Hello(
            id="router-0",
            role="router",
            incarnation=5,
            pid=42,
            host="h",
            model_digest="d1",
            group=(43, 44),
        ),
        (
            b"\xde\x00\x08\xa4type\xa5Hello\xa2id\xa8router-0\xa4role\xa6router\xabinc"
            b"arnation\x05\xa3pid*\xa4host\xa1h\xacmodel_digest\xa2d1\xa5group\x92+,"
        ),
    ),
    "Heartbeat": (
        m.Heartbeat(id="router-0", incarnation=5, state="ready", load=LOAD, view_version=9),
        (
            b"\x86\xa4type\xa9Heartbeat\xa2id\xa8router-0\xabincarnation"
            b"\x05\xa5state\xa5ready\xa4load\x86\xa4step\x07\xa7running\x02\xa7waiti"
            b"ng\x01\xafkv_blocks_total@\xaekv_blocks_free<\xa5epo"
            b"ch\x03\xacview_version\t"
        ),
    ),
    "SlotsReady": (
        m.SlotsReady(id="expert-0", incarnation=5, command=11, epoch=3),
        (
            b"\x85\xa4type\xaaSlotsReady\xa2id\xa8expert-0\xabincarnatio"
            b"n\x05\xa7command\x0b\xa5epoch\x03"
        ),
    ),
    "SlotsReady with an error": (
        m.SlotsReady(id="expert-0", incarnation=5, command=11, epoch=3, error="layer 1: no file"),
        (
            b"\x86\xa4type\xaaSlotsReady\xa2id\xa8expert-0\xabincarnatio"
            b"n\x05\xa7command\x0b\xa5epoch\x03\xa5error\xb0layer 1: no fil"
            b"e"
        ),
    ),
    "LoadReport": (
        m.LoadReport(id="router-0", incarnation=5, counts=((1, 2, 3), (0, 4, 2)), tokens=3),
        (
            b"\x85\xa4type\xaaLoadReport\xa2id\xa8router-0\xabincarnatio"
            b"n\x05\xa6counts\x92\x93\x01\x02\x03\x93\x00\x04\x02\xa6tokens\x03"
        ),
    ),
    "Goodbye": (
        m.Goodbye(id="router-0", incarnation=5, reason="stopped"),
        b"\x84\xa4type\xa7Goodbye\xa2id\xa8router-0\xabincarnation\x05\xa6reason\xa7stopped",
    ),
    "GetView": (
        m.GetView(),
        b"\x81\xa4type\xa7GetView",
    ),
    "GetStatus": (
        m.GetStatus(),
        b"\x81\xa4type\xa9GetStatus",
    ),
    "Drain": (
        m.Drain(member="expert-0", undo=True),
        b"\x83\xa4type\xa5Drain\xa6member\xa8expert-0\xa4undo\xc3",
    ),
    "Welcome": (
        m.Welcome(protocol=1, heartbeat_ms=500, broadcast="ipc:///run/broadcast.sock"),
        (
            b"\x84\xa4type\xa7Welcome\xa8protocol\x01\xacheartbeat_ms\xcd\x01\xf4"
            b"\xa9broadcast\xb9ipc:///run/broadcast.sock"
        ),
    ),
    "Refused": (
        m.Refused(reason="another model"),
        b"\x82\xa4type\xa7Refused\xa6reason\xadanother model",
    ),
    "Refused for now": (
        m.Refused(reason="full", retry=True),
        b"\x83\xa4type\xa7Refused\xa6reason\xa4full\xa5retry\xc3",
    ),
    "Unknown": (
        m.Unknown(),
        b"\x81\xa4type\xa7Unknown",
    ),
    "AssignSlots": (
        m.AssignSlots(command=11, epoch=3, moe_layers=(1, 2), slots=((0, 1), (2, -1))),
        (
            b"\x85\xa4type\xabAssignSlots\xa7command\x0b\xa5epoch\x03\xaamoe_l"
            b"ayers\x92\x01\x02\xa5slots\x92\x92\x00\x01\x92\x02\xff"
        ),
    ),
    "View": (
        VIEW,
        (
            b"\x85\xa4type\xa4View\xa7version\t\xa7members\x91\xde\x00\t\xa2id\xa8expert"
            b"-0\xa4role\xa6expert\xabincarnation\xcf\x17\x97\x9c\xfe6*\x00\x01\xa3pid*"
            b"\xa4host\xa1h\xa5state\xa7loading\xa5lanes\xb3/run/expert-"
            b"0.lanes\xa8progress\xcb?\xe0\x00\x00\x00\x00\x00\x00\xa4load\x86\xa4step\x07\xa7ru"
            b"nning\x02\xa7waiting\x01\xafkv_blocks_total@\xaekv_bloc"
            b"ks_free<\xa5epoch\x03\xa9placement\x86\xa5epoch\x03\xaamoe_la"
            b"yers\x92\x01\x02\xabnum_experts\x03\xa5ranks\x92\xa8expert-0\xa8exp"
            b"ert-1\xaeslots_per_rank\x92\x02\x01\xb3physical_to_logi"
            b"cal\x92\x93\x00\x01\x02\x93\x02\xff\x00\xacmodel_digest\xa2d1"
        ),
    ),
    "View before the first placement": (
        m.View(version=1, members=()),
        b"\x83\xa4type\xa4View\xa7version\x01\xa7members\x90",
    ),
    "Status": (
        m.Status(
            mesh="default",
            model="demo",
            view=VIEW,
            ready=False,
            reason="loading",
            epoch=3,
            balancedness=0.75,
            tokens=12,
        ),
        (
            b"\x89\xa4type\xa6Status\xa4mesh\xa7default\xa5model\xa4demo\xa4vi"
            b"ew\x85\xa4type\xa4View\xa7version\t\xa7members\x91\xde\x00\t\xa2id\xa8expe"
            b"rt-0\xa4role\xa6expert\xabincarnation\xcf\x17\x97\x9c\xfe6*\x00\x01\xa3pi"
            b"d*\xa4host\xa1h\xa5state\xa7loading\xa5lanes\xb3/run/exper"
            b"t-0.lanes\xa8progress\xcb?\xe0\x00\x00\x00\x00\x00\x00\xa4load\x86\xa4step\x07\xa7"
            b"running\x02\xa7waiting\x01\xafkv_blocks_total@\xaekv_bl"
            b"ocks_free<\xa5epoch\x03\xa9placement\x86\xa5epoch\x03\xaamoe_"
            b"layers\x92\x01\x02\xabnum_experts\x03\xa5ranks\x92\xa8expert-0\xa8e"
            b"xpert-1\xaeslots_per_rank\x92\x02\x01\xb3physical_to_lo"
            b"gical\x92\x93\x00\x01\x02\x93\x02\xff\x00\xacmodel_digest\xa2d1\xa5ready\xc2\xa6re"
            b"ason\xa7loading\xa5epoch\x03\xacbalancedness\xcb?\xe8\x00\x00\x00\x00\x00"
            b"\x00\xa6tokens\x0c"
        ),
    ),
    "Submit": (
        m.Submit(
            request="r1",
            trace="x-1",
            prompt=(1, 2, 300),
            sampling=m.Sampling(
                temperature=0.5,
                seed=18_446_744_073_709_551_615,
                logit_bias=((5, -100.0),),
                stop_token_ids=(2,),
                max_tokens=8,
                logprobs=1,
            ),
            output=(9,),
            priority=-1,
            deadline_ms=1000,
        ),
        (
            b"\x88\xa4type\xa6Submit\xa7request\xa2r1\xa5trace\xa3x-1\xa6promp"
            b"t\x93\x01\x02\xcd\x01,\xa8sampling\x86\xabtemperature\xcb?\xe0\x00\x00\x00\x00\x00\x00\xa4s"
            b"eed\xcf\xff\xff\xff\xff\xff\xff\xff\xff\xaalogit_bias\x91\x92\x05\xcb\xc0Y\x00\x00\x00\x00\x00\x00\xaestop"
            b"_token_ids\x91\x02\xaamax_tokens\x08\xa8logprobs\x01\xa6outpu"
            b"t\x91\t\xa8priority\xff\xabdeadline_ms\xcd\x03\xe8"
        ),
    ),
    "Submit with defaults": (
        m.Submit(request="r1", trace="", prompt=(1,), sampling=m.Sampling()),
        b"\x85\xa4type\xa6Submit\xa7request\xa2r1\xa5trace\xa0\xa6prompt\x91\x01\xa8sampling\x80",
    ),
    "Cancel": (
        m.Cancel(requests=("r1", "r2")),
        b"\x82\xa4type\xa6Cancel\xa8requests\x92\xa2r1\xa2r2",
    ),
    "Ping": (
        m.Ping(gateway="gateway-0", incarnation=5),
        b"\x83\xa4type\xa4Ping\xa7gateway\xa9gateway-0\xabincarnation\x05",
    ),
    "Tokens": (
        m.Tokens(
            step=70_000,
            deltas=(
                m.Delta(
                    request="r1",
                    tokens=(7,),
                    logprobs=(m.Logprob(7, -0.5, ((7, -0.5), (8, -1.5))),),
                    prompt_logprobs=(None, m.Logprob(2, -0.25)),
                    cached_tokens=16,
                ),
                m.Delta(request="r2", finish="stop", stop_token=2),
                m.Delta(request="r3", finish="error", error="experts of layer 1 are gone"),
            ),
        ),
        (
            b"\x83\xa4type\xa6Tokens\xa4step\xce\x00\x01\x11p\xa6deltas\x93\x85\xa7request"
            b"\xa2r1\xa6tokens\x91\x07\xa8logprobs\x91\x93\x07\xcb\xbf\xe0\x00\x00\x00\x00\x00\x00\x92\x92\x07\xcb\xbf\xe0\x00"
            b"\x00\x00\x00\x00\x00\x92\x08\xcb\xbf\xf8\x00\x00\x00\x00\x00\x00\xafprompt_logprobs\x92\xc0\x93\x02\xcb\xbf\xd0\x00"
            b"\x00\x00\x00\x00\x00\x90\xadcached_tokens\x10\x83\xa7request\xa2r2\xa6finish"
            b"\xa4stop\xaastop_token\x02\x83\xa7request\xa2r3\xa6finish\xa5err"
            b"or\xa5error\xbbexperts of layer 1 are gone"
        ),
    ),
    "Rejected": (
        m.Rejected(request="r1", reason="queue full", retry_after_s=1.5),
        (
            b"\x84\xa4type\xa8Rejected\xa7request\xa2r1\xa6reason\xaaqueue "
            b"full\xadretry_after_s\xcb?\xf8\x00\x00\x00\x00\x00\x00"
        ),
    ),
    "Pong": (
        m.Pong(router="router-0", incarnation=5, ready=True, reason="", load=LOAD),
        (
            b"\x86\xa4type\xa4Pong\xa6router\xa8router-0\xabincarnation\x05"
            b"\xa5ready\xc3\xa6reason\xa0\xa4load\x86\xa4step\x07\xa7running\x02\xa7wai"
            b"ting\x01\xafkv_blocks_total@\xaekv_blocks_free<\xa5e"
            b"poch\x03"
        ),
    ),
    "Recorded": (
        m.Recorded(
            id="router-0",
            incarnation=5,
            command=4,
            recording=True,
            steps=9,
            path="/r/1.safetensors",
        ),
        (
            b"\x87\xa4type\xa8Recorded\xa2id\xa8router-0\xabincarnation\x05"
            b"\xa7command\x04\xa9recording\xc3\xa5steps\t\xa4path\xb0/r/1.sa"
            b"fetensors"
        ),
    ),
    "GetLoad": (
        m.GetLoad(),
        (b"\x81\xa4type\xa7GetLoad"),
    ),
    "GetPlan": (
        m.GetPlan(),
        (b"\x81\xa4type\xa7GetPlan"),
    ),
    "Rebalance": (
        m.Rebalance(force=True),
        (b"\x82\xa4type\xa9Rebalance\xa5force\xc3"),
    ),
    "SetMode": (
        m.SetMode(mode="advise"),
        (b"\x82\xa4type\xa7SetMode\xa4mode\xa6advise"),
    ),
    "Pin": (
        m.Pin(layer=1, expert=2, ranks=("expert-0",)),
        (b"\x84\xa4type\xa3Pin\xa5layer\x01\xa6expert\x02\xa5ranks\x91\xa8expert-0"),
    ),
    "Propose": (
        m.Propose(
            ranks=("expert-0", "expert-1"),
            slots_per_rank=(2, 1),
            physical_to_logical=((0, 1, 2), (2, 1, 0)),
        ),
        (
            b"\x84\xa4type\xa7Propose\xa5ranks\x92\xa8expert-0\xa8expert-1\xae"
            b"slots_per_rank\x92\x02\x01\xb3physical_to_logical\x92\x93\x00"
            b"\x01\x02\x93\x02\x01\x00"
        ),
    ),
    "RecordLoad": (
        m.RecordLoad(action="dump"),
        (b"\x82\xa4type\xaaRecordLoad\xa6action\xa4dump"),
    ),
    "Record": (
        m.Record(command=4, action="start"),
        (b"\x83\xa4type\xa6Record\xa7command\x04\xa6action\xa5start"),
    ),
    "LoadDetail": (
        m.LoadDetail(
            window_s=60.0,
            moe_layers=(1,),
            ranks=("expert-0",),
            prefill=((1, 2),),
            decode=((3, 4),),
            rank_tokens=((10,),),
            balancedness=(1.0,),
            overall=1.0,
        ),
        (
            b"\x89\xa4type\xaaLoadDetail\xa8window_s\xcb@N\x00\x00\x00\x00\x00\x00\xaamoe_"
            b"layers\x91\x01\xa5ranks\x91\xa8expert-0\xa7prefill\x91\x92\x01\x02\xa6dec"
            b"ode\x91\x92\x03\x04\xabrank_tokens\x91\x91\n\xacbalancedness\x91\xcb?\xf0\x00"
            b"\x00\x00\x00\x00\x00\xa7overall\xcb?\xf0\x00\x00\x00\x00\x00\x00"
        ),
    ),
    "PlanDetail": (
        m.PlanDetail(
            mode="auto",
            policy="mesh",
            epoch=3,
            planned_at=1.5,
            moves=2,
            gain_s=0.5,
            cost_s=0.25,
            verdict="moving",
            reason="r",
            proposed=PLACEMENT,
            phase="loading",
            moved=1,
            to_move=2,
            faults=("f",),
            pins=(m.PinDetail(layer=1, expert=2, ranks=("expert-0",)),),
        ),
        (
            b"\xde\x00\x10\xa4type\xaaPlanDetail\xa4mode\xa4auto\xa6policy\xa4mes"
            b"h\xa5epoch\x03\xaaplanned_at\xcb?\xf8\x00\x00\x00\x00\x00\x00\xa5moves\x02\xa6gain"
            b"_s\xcb?\xe0\x00\x00\x00\x00\x00\x00\xa6cost_s\xcb?\xd0\x00\x00\x00\x00\x00\x00\xa7verdict\xa6movi"
            b"ng\xa6reason\xa1r\xa8proposed\x86\xa5epoch\x03\xaamoe_layers\x92"
            b"\x01\x02\xabnum_experts\x03\xa5ranks\x92\xa8expert-0\xa8expert-1"
            b"\xaeslots_per_rank\x92\x02\x01\xb3physical_to_logical\x92\x93"
            b"\x00\x01\x02\x93\x02\xff\x00\xa5phase\xa7loading\xa5moved\x01\xa7to_move\x02\xa6fa"
            b"ults\x91\xa1f\xa4pins\x91\x83\xa5layer\x01\xa6expert\x02\xa5ranks\x91\xa8exp"
            b"ert-0"
        ),
    ),
    "RecordDetail": (
        m.RecordDetail(routers=(m.RecordedAt(router="router-0", recording=True, steps=9),)),
        (
            b"\x82\xa4type\xacRecordDetail\xa7routers\x91\x85\xa6router\xa8rou"
            b"ter-0\xa9recording\xc3\xa5steps\t\xa4path\xa0\xa5error\xa0"
        ),
    ),
    "AdminRefused": (
        m.AdminRefused(reason="no such expert"),
        (b"\x82\xa4type\xacAdminRefused\xa6reason\xaeno such expert"),
    ),
    "FetchBundle": (
        m.FetchBundle(layer=1, slot=0, expert=2, offset=0, size=1024),
        (
            b"\x86\xa4type\xabFetchBundle\xa5layer\x01\xa4slot\x00\xa6expert\x02\xa6"
            b"offset\x00\xa4size\xcd\x04\x00"
        ),
    ),
    "BundleChunk": (
        m.BundleChunk(
            layer=1, slot=0, expert=2, offset=0, total=4, checksum=b"c", shadow=b"s", data=b"data"
        ),
        (
            b"\x89\xa4type\xabBundleChunk\xa5layer\x01\xa4slot\x00\xa6expert\x02\xa6"
            b"offset\x00\xa5total\x04\xa8checksum\xc4\x01c\xa6shadow\xc4\x01s\xa4dat"
            b"a\xc4\x04data"
        ),
    ),
}
UNIONS = {
    "ToPlanner": m.ToPlanner,
    "FromPlanner": m.FromPlanner,
    "ToRouter": m.ToRouter,
    "FromRouter": m.FromRouter,
    "ToBundles": m.ToBundles,
    "FromBundles": m.FromBundles,
}


def _members(union: object) -> tuple[type, ...]:
    """The messages of a direction; one that has a single message is that message."""
    return typing.get_args(union) or (typing.cast("type", union),)


def _union_of(message: object) -> object:
    return next(u for u in UNIONS.values() if isinstance(message, _members(u)))


@pytest.mark.parametrize("name", GOLDEN)
def test_bytes_of_each_message_are_pinned(name: str) -> None:
    message, golden = GOLDEN[name]
    assert msgspec.msgpack.encode(message) == golden


@pytest.mark.parametrize("name", ["View", "Status"])
def test_a_member_of_fewer_fields_is_read_as_well(name: str) -> None:
    """Since it has more than 15 fields its map has the longer head, whatever it holds."""
    message, golden = GOLDEN[name]
    short = golden.replace(b"\xde\x00\t\xa2id", b"\x89\xa2id")
    assert short != golden
    assert msgspec.msgpack.decode(short, type=_union_of(message)) == message


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_bytes_decode_to_the_message(name: str) -> None:
    message, golden = GOLDEN[name]
    assert msgspec.msgpack.decode(golden, type=_union_of(message)) == message


def test_every_message_of_every_direction_has_golden_bytes() -> None:
    in_unions = {cls.__name__ for union in UNIONS.values() for cls in _members(union)}
    assert in_unions == {type(message).__name__ for message, _ in GOLDEN.values()}


@pytest.mark.parametrize("name", GOLDEN)
def test_a_newer_peers_extra_field_is_ignored(name: str) -> None:
    message, golden = GOLDEN[name]
    fields = msgspec.msgpack.decode(golden)
    newer = msgspec.msgpack.encode({**fields, "field_of_tomorrow": [1, 2]})
    assert msgspec.msgpack.decode(newer, type=_union_of(message)) == message


@pytest.mark.parametrize("union", UNIONS)
def test_a_message_of_another_direction_is_refused(union: str) -> None:
    ours = _members(UNIONS[union])
    for message, golden in GOLDEN.values():
        if not isinstance(message, ours):
            with pytest.raises(msgspec.ValidationError):
                msgspec.msgpack.decode(golden, type=UNIONS[union])


def test_messages_cannot_be_changed_after_the_fact() -> None:
    with pytest.raises(AttributeError):
        VIEW.version = 10  # type: ignore[misc]


def test_silence_about_protocols_means_the_first_whatever_the_reader_speaks() -> None:
    said = m.Hello(id="x", role="router", incarnation=1, pid=1, host="h", model_digest="")
    assert b"protocol" not in msgspec.msgpack.encode(said)
    assert (said.protocol_min, said.protocol_max) == (1, 1)
    newer = msgspec.structs.replace(said, protocol_max=2)
    assert b"protocol_max" in msgspec.msgpack.encode(newer)
