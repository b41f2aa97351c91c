"""Every decoder of bytes that another process, a file or a client may have made.

Each is called with any bytes and returns, whatever they are, or raises one of the errors that it
promises; anything else is a defect. ``test_decoders.py`` gives them to Hypothesis in the suite,
``atheris_run.py`` to coverage-guided fuzzing (``make fuzz``).
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from ep_kernels.bundle import BundleError, open_bundle, pack_bundle
from ep_kernels.grouped_ffn import ExpertBank
from ep_kernels.plane import LaneShape, PlaneError
from ep_kernels.shm import handshake
from ep_kernels.shm.lane import CorruptLaneError, RingSlot, read_request
from ep_kernels.shm.layout import lay_out
from ep_kernels.tcp import handshake as tcp_handshake

from gateway.api.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    parse,
)
from gateway.errors import ApiError
from gateway.keys import KeysError, parse_keys, read_keys
from mesh.config import ConfigError, load
from mesh.curve import CurveError, open_keyring
from mesh.inbox import Codec, Counters
from mesh.messages import (
    BundleChunk,
    Cancel,
    FetchBundle,
    FromPlanner,
    FromRouter,
    Heartbeat,
    Load,
    Placement,
    ToPlanner,
    ToRouter,
    View,
)
from mesh.settings import SecuritySettings
from moe_model.config_json import read_json_object
from moe_model.errors import CheckpointError
from moe_model.safetensors_header import read_header
from planner_svc.formats import FormatError, Shape, read_initial
from planner_svc.store import StoreError, read_orders, read_plan


@dataclass(frozen=True)
class Decoder:
    """``seeds``: bytes that it accepts, to be changed here and there."""

    read: Callable[[bytes], object]
    promised: tuple[type[Exception], ...]
    seeds: Sequence[bytes] = field(default=(b"",))

    def __call__(self, data: bytes) -> None:
        with contextlib.suppress(*self.promised):
            self.read(data)


def _message(union: Any) -> Callable[[bytes], object]:
    codec: Codec[object, object] = Codec(union, "ipc://fuzz", Counters())
    return lambda data: codec.decode([data])


def _as_file(read: Callable[[Path], object], name: str = "file") -> Callable[[bytes], object]:
    """Call ``read`` with a file of the bytes, in a directory of its own."""

    def run(data: bytes) -> object:
        with tempfile.TemporaryDirectory(prefix="moemesh-fuzz-") as directory:
            path = Path(directory, name)
            path.touch(0o600)
            path.write_bytes(data)
            return read(path)

    return run


def _bundle(data: bytes) -> object:
    held = torch.empty(len(data), dtype=torch.uint8)  # aligned, as what was fetched is
    if data:
        held.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return open_bundle(held, 1, 2)


def _a_bundle() -> bytes:
    torch.manual_seed(0)
    bank = ExpertBank(1, 4, 3)
    kept = bank.keep(torch.randn(3, 4), torch.randn(3, 4), torch.randn(4, 3))
    return bytes(pack_bundle(kept, 1, 2).numpy())


_LANE = lay_out(LaneShape(hidden=4, top_k=2, capacity_tokens=3, ring_slots=1))


def _lane_slot(data: bytes) -> object:
    """A request as a router may leave it in the memory it shares with an expert worker."""
    memory = bytearray(_LANE.total_bytes)
    body = data[: _LANE.slot_bytes]
    memory[_LANE.slots : _LANE.slots + len(body)] = body
    slot = RingSlot(memory, _LANE, 0)  # type: ignore[arg-type]  # any writable buffer will do
    read_request(slot, 1, _LANE.shape)
    return slot.read_answer(1, 1)


def _tcp_challenge(data: bytes) -> object:
    size = tcp_handshake.CHALLENGE_BYTES
    return tcp_handshake.read_challenge(data[:size].ljust(size, b"\0"))


def _tcp_offer(data: bytes) -> object:
    head = data[: tcp_handshake.HEAD_BYTES].ljust(tcp_handshake.HEAD_BYTES, b"\0")
    tcp_handshake.body_bytes(head)
    return tcp_handshake.read_offer(head, data[len(head) :], b"key", b"challenged")


def _curve(path: Path) -> object:
    security = SecuritySettings(
        curve_dir=str(path.parent), key_file=str(path), allow_file=str(path)
    )
    return open_keyring(security, "router-0", "router")


_SHAPE = Shape(moe_layers=(1, 2), num_layers=3, num_experts=4)
_PLACEMENT = Placement(
    epoch=3,
    moe_layers=(1, 2),
    num_experts=4,
    ranks=("e0", "e1"),
    slots_per_rank=(2, 2),
    physical_to_logical=((0, 1, 2, 3), (3, 2, 1, 0)),
)
_TENSOR = {"w": {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8]}}
_HEADER = json.dumps(_TENSOR).encode()
_ASCEND = {
    "layer_id": 1,
    "device_count": 1,
    "device_list": [{"device_id": 0, "device_expert": [0, 1, 2, 3]}],
}
_pack = msgspec.msgpack.encode

DECODERS: dict[str, Decoder] = {
    **{
        f"request-{kind.__name__}": Decoder(
            lambda data, kind=kind: parse(data, kind),
            (ApiError,),
            [body],  # type: ignore[misc]
        )
        for kind, body in (
            (CompletionRequest, b'{"model": "m", "prompt": [1, 2], "stop": ["a"], "n": 2}'),
            (ChatRequest, b'{"model": "m", "messages": [{"role": "user", "content": "hi"}]}'),
            (TokenizeRequest, b'{"model": "m", "prompt": "hi"}'),
            (DetokenizeRequest, b'{"model": "m", "tokens": [1]}'),
        )
    },
    "to-planner": Decoder(
        _message(ToPlanner),
        (),
        [_pack(Heartbeat(id="r", incarnation=1, state="ready", load=Load(), view_version=2))],
    ),
    "from-planner": Decoder(
        _message(FromPlanner), (), [_pack(View(version=1, members=(), placement=_PLACEMENT))]
    ),
    "to-router": Decoder(_message(ToRouter), (), [_pack(Cancel(requests=("a",)))]),
    "from-router": Decoder(_message(FromRouter), ()),
    "fetch-bundle": Decoder(_message(FetchBundle), ()),
    "bundle-chunk": Decoder(_message(BundleChunk), ()),
    "bundle": Decoder(_bundle, (BundleError,), [_a_bundle()]),
    "lane-offer": Decoder(
        lambda data: handshake.decode(data, handshake.Offer),
        (PlaneError,),
        [json.dumps({"protocol": handshake.PROTOCOL, "router": "r"}).encode()],
    ),
    "lane-reply": Decoder(
        lambda data: handshake.decode(data, handshake.Reply),
        (PlaneError,),
        [handshake.encode(handshake.Reply(sender=1))],
    ),
    "lane-slot": Decoder(_lane_slot, (CorruptLaneError,), [b"\1" + bytes(200)]),
    "tcp-challenge": Decoder(_tcp_challenge, (PlaneError,), [tcp_handshake.challenge(bytes(16))]),
    "tcp-offer": Decoder(
        _tcp_offer,
        (PlaneError,),
        [tcp_handshake.pack_offer(b"body", b"key", b"challenged", bytes(16))],
    ),
    "safetensors": Decoder(
        _as_file(read_header, "model.safetensors"),
        (CheckpointError,),
        [len(_HEADER).to_bytes(8, "little") + _HEADER + bytes(8)],
    ),
    "config-json": Decoder(
        _as_file(lambda path: read_json_object(path, "a model needs it"), "config.json"),
        (CheckpointError,),
        [b'{"hidden_size": 8}'],
    ),
    "initial-placement": Decoder(
        _as_file(lambda path: read_initial(str(path), _SHAPE)),
        (FormatError,),
        [
            b'{"physical_to_logical_map": [[0, 1, 2, 3], [0, 1, 2, 3], [3, 2, 1, 0]]}',
            b'{"logical_count": [[1, 2, 3, 4], [4, 3, 2, 1], [0, 0, 0, 1]]}',
            b"num_slots: 4\ninitial_global_assignments:\n  1: [0, 1, 2, 3]\n  2: [3, 2, 1, 0]\n",
            json.dumps({"moe_layer_count": 1, "layer_list": [_ASCEND]}).encode(),
        ],
    ),
    "stored-plan": Decoder(
        _as_file(lambda path: read_plan(path.parent, "d"), "plan.json"), (StoreError,)
    ),
    "stored-orders": Decoder(
        _as_file(lambda path: read_orders(path.parent), "orders.json"), (StoreError,)
    ),
    "settings": Decoder(
        _as_file(lambda path: load(path, {}, {}), "mesh.toml"),
        (ConfigError,),
        [b"[router]\nmax_running = 8\n[mesh]\nname = 'a'\n"],
    ),
    "keys-file": Decoder(
        _as_file(lambda path: read_keys(str(path)), "keys.toml"),
        (KeysError,),
        [b"[[key]]\nname = 'a'\nsha256 = '" + b"0" * 64 + b"'\n"],
    ),
    "keys-variable": Decoder(
        lambda data: parse_keys(data.decode("utf-8", "surrogateescape"), "MOEMESH_API_KEYS"),
        (KeysError,),
        [b"a=0123456789abcdef0123456789abcdef"],
    ),
    "curve-files": Decoder(_as_file(_curve, "router-0.key"), (CurveError,)),
}
