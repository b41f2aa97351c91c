"""Control messages: frozen tagged msgspec Structs, one union per direction.

A field is only ever added with a default and never retyped, so that neighbouring protocol
versions read each other's bytes (golden bytes in ``tests/unit/mesh/test_messages.py``).

Directions
    member  -> planner   ``ToPlanner``
    planner -> member    ``FromPlanner``     (``View`` is also what the planner broadcasts)
    expert  -> expert    ``ToBundles``, answered by ``FromBundles``
    gateway -> router    ``ToRouter``
    router  -> gateway   ``FromRouter``
"""

from __future__ import annotations

from typing import Literal

import msgspec

PROTOCOL_MIN = 1
PROTOCOL_MAX = 1

Role = Literal["gateway", "router", "expert", "planner", "admin"]
MemberState = Literal["joining", "loading", "ready", "suspect", "draining", "dead", "left"]
FinishReason = Literal["stop", "length", "cancelled", "error"]
Mode = Literal["off", "advise", "auto"]
"""What the planner does with its plans: none are made; made and reported; carried out."""
RecordAction = Literal["start", "stop", "dump"]
RECORD_WAIT_S = 5.0
"""How long the planner waits for routers to do what ``RecordLoad`` says."""


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    pass


# ---------------------------------------------------------------- what a mesh looks like


class Member(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One process of the mesh as the planner knows it."""

    id: str
    role: Role
    incarnation: int
    pid: int
    host: str
    state: MemberState
    control: str = ""
    """Router: the ZeroMQ address gateways connect to."""
    lanes: str = ""
    """Expert: the address routers open their lanes at (a Unix socket path for ``shm``)."""
    metrics: str = ""
    """URL of the member's Prometheus page, or empty."""
    detail: str = ""
    """Why the member is not ready, or what it does beside its work, in words."""
    progress: float = 1.0
    """Share of the weights that it has loaded, 0 to 1."""
    load: Load | None = None
    bundles: str = ""
    """Expert: the ZeroMQ address at which other expert workers fetch experts from its memory."""
    pid_namespace: int = 0
    """Among which processes of ``host`` its ``pid`` is counted; 0: not known."""
    lanes_tcp: str = ""
    """Expert: where routers of other hosts open their lanes and what they must prove to know
    there, ``tcp://HOST:PORT#KEY``. A ``Status`` shows no key."""
    host_id: str = ""
    """Members of one value are on one host and can share memory."""
    group: tuple[int, ...] = ()
    """Router: pids of the processes that compute with it (``router.tp`` - 1 of them)."""


class Load(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a member reports with each heartbeat. Unused fields stay at their default."""

    step: int = 0
    """Engine steps (router) or grouped FFN calls (expert) done since start."""
    running: int = 0
    waiting: int = 0
    kv_blocks_total: int = 0
    kv_blocks_free: int = 0
    lane_slots_in_use: int = 0
    epoch: int = 0
    """Epoch of the placement that the member uses (router) or holds (expert)."""
    resident_bytes: int = 0
    pairs: int = 0
    """Expert: (token, expert) pairs computed since start."""
    ffn_ns: int = 0
    """Expert: time spent computing them."""


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Which logical expert each physical slot holds.

    ``physical_to_logical[i][p]`` is the logical expert in physical slot ``p`` of MoE layer
    ``moe_layers[i]``, or -1 for an empty (spare) slot. The slots of rank ``r`` are consecutive:
    ``slots_per_rank[r]`` of them, and ``ranks[r]`` is that member's id. Ranks need not hold
    equally many slots. A local slot is the physical slot minus the rank's first.
    """

    epoch: int
    moe_layers: tuple[int, ...]
    num_experts: int
    ranks: tuple[str, ...]
    slots_per_rank: tuple[int, ...]
    physical_to_logical: tuple[tuple[int, ...], ...]


class View(_Message, frozen=True, kw_only=True):
    """A whole snapshot of the mesh; a newer ``version`` replaces an older one entirely."""

    version: int
    members: tuple[Member, ...]
    placement: Placement | None = None
    model_digest: str = ""


# ---------------------------------------------------------------- member -> planner


class Hello(_Message, frozen=True, kw_only=True):
    """First message of a member; sent again after each reconnection or ``Unknown``."""

    id: str
    role: Role
    incarnation: int
    pid: int
    host: str
    model_digest: str
    protocol_min: int = 1
    protocol_max: int = 1
    """What its code speaks (``mesh.member`` fills it in). The defaults are what silence means, and
    so no constants of a release: a default is not sent, and its reader takes its own for it."""
    control: str = ""
    lanes: str = ""
    metrics: str = ""
    num_slots: int = 0
    """Expert: the most slots per MoE layer that it can hold (0: as many as it is given)."""
    bundles: str = ""
    """Expert: see ``Member.bundles``."""
    lanes_tcp: str = ""
    """Expert: see ``Member.lanes_tcp``."""
    host_id: str = ""
    speed: float = 1.0
    """Expert: how fast it computes, relative to its peers."""
    group: tuple[int, ...] = ()
    """Router: see ``Member.group``."""
    placement: Placement | None = None
    """Newest placement the member knows (``mesh.member`` fills it in), from which a restarted
    planner rebuilds its own and learns that the mesh is older than itself."""
    pid_namespace: int = 0
    """See ``Member.pid_namespace``."""


class Heartbeat(_Message, frozen=True, kw_only=True):
    id: str
    incarnation: int
    state: MemberState
    load: Load
    detail: str = ""
    progress: float = 1.0
    view_version: int = 0
    """Newest view the member has; the planner answers with a ``View`` when that is old."""


class SlotFault(msgspec.Struct, frozen=True, array_like=True):
    """A slot that could not be filled; it is empty."""

    layer: int
    """The model's layer number."""
    slot: int
    """Local slot."""
    expert: int
    reason: str


class SlotsReady(_Message, frozen=True, kw_only=True):
    """Acknowledges ``AssignSlots``: the rank holds what it was told to, but for ``faults``; or,
    with ``error``, why it could do nothing.
    """

    id: str
    incarnation: int
    command: int
    epoch: int
    error: str = ""
    faults: tuple[SlotFault, ...] = ()
    loaded: int = 0
    """Experts that were loaded for this command, from peers or the checkpoint."""
    from_peers: int = 0
    """How many of them came from another worker's memory."""
    loaded_bytes: int = 0
    seconds: float = 0.0
    """How long loading them took."""


class LoadReport(_Message, frozen=True, kw_only=True):
    """Real tokens (no padding) counted at the sender since its last report.

    ``counts[i][e]``: tokens routed to logical expert ``e`` of MoE layer ``moe_layers[i]``, and
    ``decode_counts`` those of them that belong to decode steps (the others are prefill).
    ``rank_tokens[i][r]``: pairs that went to ``ranks[r]``, by the placement of ``epoch``.
    """

    id: str
    incarnation: int
    counts: tuple[tuple[int, ...], ...]
    tokens: int = 0
    decode_counts: tuple[tuple[int, ...], ...] = ()
    epoch: int = 0
    ranks: tuple[str, ...] = ()
    rank_tokens: tuple[tuple[int, ...], ...] = ()


class Recorded(_Message, frozen=True, kw_only=True):
    """Router: acknowledges ``Record``."""

    id: str
    incarnation: int
    command: int
    recording: bool
    steps: int = 0
    """Steps recorded and kept so far."""
    path: str = ""
    """The file written by ``dump``, on the router's host."""
    error: str = ""


class Goodbye(_Message, frozen=True, kw_only=True):
    """The member stops of its own will; it holds nothing any more."""

    id: str
    incarnation: int
    reason: str = ""


class GetView(_Message, frozen=True, kw_only=True):
    """Any role: ask for the newest ``View``."""


class GetStatus(_Message, frozen=True, kw_only=True):
    """Admin: ask for ``Status``."""


# What an administrator asks the planner (the gateway's /admin pages, ``moemesh plan``). Each is
# answered on the same connection, by what is named here or by ``AdminRefused``.


class GetLoad(_Message, frozen=True, kw_only=True):
    """Ask for ``LoadDetail``."""


class GetPlan(_Message, frozen=True, kw_only=True):
    """Ask for ``PlanDetail``."""


class Rebalance(_Message, frozen=True, kw_only=True):
    """Plan now rather than at the next interval; answered by ``PlanDetail``. ``force`` carries the
    plan out even when it costs more than it gains (never in mode ``off`` or ``advise``).
    """

    force: bool = False


class SetMode(_Message, frozen=True, kw_only=True):
    """Answered by ``PlanDetail``."""

    mode: Mode


class Pin(_Message, frozen=True, kw_only=True):
    """Keep a copy of ``expert`` of MoE layer ``layer`` on each of ``ranks`` from the next plan on;
    no ranks: lift the pin. Answered by ``PlanDetail``.
    """

    layer: int
    expert: int
    ranks: tuple[str, ...]


class Propose(_Message, frozen=True, kw_only=True):
    """Roll out this placement, whatever it costs, in any mode: ``physical_to_logical`` as in
    ``Placement``, over the ``ranks`` named with ``slots_per_rank`` serving slots each. Answered by
    ``PlanDetail``.
    """

    ranks: tuple[str, ...]
    slots_per_rank: tuple[int, ...]
    physical_to_logical: tuple[tuple[int, ...], ...]


class RecordLoad(_Message, frozen=True, kw_only=True):
    """Counts per step, layer and expert at the routers: answered by ``RecordDetail`` once every
    router has answered or ``RECORD_WAIT_S`` has passed.
    """

    action: RecordAction


class Drain(_Message, frozen=True, kw_only=True):
    """Give ``member`` no more work until its process ends, or until ``undo``: routers get no new
    sequences, the experts of a worker are moved to others, a gateway says that it is not ready.
    Answered by ``PlanDetail``; the view shows the member as draining.
    """

    member: str
    undo: bool = False


Admin = GetLoad | GetPlan | Rebalance | SetMode | Pin | Propose | RecordLoad | Drain

ToPlanner = (
    Hello
    | Heartbeat
    | SlotsReady
    | LoadReport
    | Recorded
    | Goodbye
    | GetView
    | GetStatus
    | GetLoad
    | GetPlan
    | Rebalance
    | SetMode
    | Pin
    | Propose
    | RecordLoad
    | Drain
)


# ---------------------------------------------------------------- planner -> member


class Welcome(_Message, frozen=True, kw_only=True):
    protocol: int
    heartbeat_ms: int
    broadcast: str
    """Address of the planner's PUB socket, on which every new ``View`` appears."""


class Refused(_Message, frozen=True, kw_only=True):
    """The member may not join (other model, no common protocol, fenced incarnation): it exits."""

    reason: str
    retry: bool = False
    """True when trying again later can help."""


class Unknown(_Message, frozen=True, kw_only=True):
    """The planner does not know the sender (it restarted): say ``Hello`` again."""


class Source(msgspec.Struct, frozen=True, array_like=True):
    """Where an expert that is to be loaded lies in another worker's memory."""

    layer: int
    """The model's layer number."""
    slot: int
    """Local slot that is to be filled."""
    peer: str
    address: str
    """The peer's ``Member.bundles``."""
    peer_slot: int


class AssignSlots(_Message, frozen=True, kw_only=True):
    """Expert: hold exactly this. ``slots[i][s]``: logical expert for local slot ``s`` of MoE
    layer ``moe_layers[i]``. Idempotent: repeated until ``SlotsReady`` carries ``command``.

    Slots without a source, or whose source fails, are read from the checkpoint. At most
    ``bytes_per_s`` are loaded a second (0: no limit).
    """

    command: int
    epoch: int
    moe_layers: tuple[int, ...]
    slots: tuple[tuple[int, ...], ...]
    sources: tuple[Source, ...] = ()
    bytes_per_s: int = 0


class Record(_Message, frozen=True, kw_only=True):
    """Router: start, stop or write out the recording of loads. Answered by ``Recorded``."""

    command: int
    action: RecordAction


class Status(_Message, frozen=True, kw_only=True):
    """Answer to ``GetStatus``: what ``moemesh status`` shows."""

    mesh: str
    model: str
    view: View
    ready: bool
    reason: str
    epoch: int
    balancedness: float
    """Mean over ranks / max over ranks of real tokens in the last window, mean over layers."""
    tokens: int
    mode: Mode = "off"
    phase: str = ""
    """What the roll-out under way is doing, in a word; empty when none is."""
    alarms: tuple[str, ...] = ()
    """What an operator should look at, in words."""
    moving: str = ""
    """Why experts are being moved: first, repair, join, drain, rebalance, admin, or settling (a
    move's end); empty when all are where they are to be."""
    moved: int = 0
    """Slots of that move that are done."""
    to_move: int = 0


class LoadDetail(_Message, frozen=True, kw_only=True):
    """Answer to ``GetLoad``: real tokens of the last ``window_s`` seconds.

    ``prefill`` and ``decode`` ``[moe layers][num_experts]``; ``rank_tokens`` ``[moe layers]
    [ranks]`` as sent; ``balancedness`` ``[moe layers]``: mean over ranks / max over ranks.
    """

    window_s: float
    moe_layers: tuple[int, ...]
    ranks: tuple[str, ...]
    prefill: tuple[tuple[int, ...], ...]
    decode: tuple[tuple[int, ...], ...]
    rank_tokens: tuple[tuple[int, ...], ...]
    balancedness: tuple[float, ...]
    overall: float


class PinDetail(msgspec.Struct, frozen=True, kw_only=True):
    layer: int
    expert: int
    ranks: tuple[str, ...]


class PlanDetail(_Message, frozen=True, kw_only=True):
    """What the planner last thought of, what became of it, and what it is doing now."""

    mode: Mode
    policy: str
    epoch: int
    """Of the placement in force."""
    planned_at: float = 0.0
    """Unix time of the latest plan; 0: none yet. The fields to ``verdict`` are about it."""
    balancedness_before: float = 1.0
    """Of the placement in force, on the loads that the plan was made for."""
    balancedness_after: float = 1.0
    """Of the plan, on the same loads."""
    moves: int = 0
    """Slots whose expert would have to be loaded."""
    gain_s: float = 0.0
    """Expert seconds that the plan is predicted to save over the horizon."""
    cost_s: float = 0.0
    """Seconds of loading that it costs."""
    verdict: str = ""
    """``moved``, ``moving``, ``advised``, ``skipped``, ``failed``, or empty."""
    reason: str = ""
    """Why, in words, with the numbers."""
    proposed: Placement | None = None
    phase: str = ""
    """Of the roll-out under way: ``loading``, ``committing``, ``draining``; empty when none is."""
    moved: int = 0
    """Slots of the roll-out that are done."""
    to_move: int = 0
    faults: tuple[str, ...] = ()
    """What went wrong in the latest roll-outs, newest first."""
    retry_in_s: float = 0.0
    """When a roll-out that failed is tried again; 0: nothing waits."""
    pins: tuple[PinDetail, ...] = ()


class RecordedAt(msgspec.Struct, frozen=True, kw_only=True):
    router: str
    recording: bool
    steps: int
    path: str = ""
    error: str = ""


class RecordDetail(_Message, frozen=True, kw_only=True):
    """Answer to ``RecordLoad``."""

    routers: tuple[RecordedAt, ...]


class AdminRefused(_Message, frozen=True, kw_only=True):
    """What was asked is impossible or wrong; nothing was changed."""

    reason: str


FromPlanner = (
    Welcome
    | Refused
    | Unknown
    | AssignSlots
    | Record
    | View
    | Status
    | LoadDetail
    | PlanDetail
    | RecordDetail
    | AdminRefused
)


# ---------------------------------------------------------------- expert -> expert


class FetchBundle(_Message, frozen=True, kw_only=True):
    """Ask a worker for one expert of its memory: bytes ``offset`` to ``offset + size``."""

    layer: int
    slot: int
    expert: int
    offset: int
    size: int


class BundleChunk(_Message, frozen=True, kw_only=True):
    """Answer to ``FetchBundle``; ``error`` when the slot does not hold the expert (any more)."""

    layer: int
    slot: int
    expert: int
    offset: int
    total: int = 0
    """Bytes of the whole bundle."""
    checksum: bytes = b""
    """Of the whole bundle, as its owner loaded it."""
    shadow: bytes = b""
    """With the first chunk: what the expert made of its shadow token there, fp32."""
    data: bytes = b""
    error: str = ""


ToBundles = FetchBundle
FromBundles = BundleChunk


# ---------------------------------------------------------------- gateway <-> router


SEED_MASK = 2**63 - 1
"""The bits of a client's seed that count."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to draw a token. The number drawn depends on (``seed``, position) alone."""

    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means off."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int = 16
    logprobs: int = -1
    """-1: none; 0: the chosen token's; n: also the n most likely."""
    prompt_logprobs: int = -1


class Submit(_Message, frozen=True, kw_only=True):
    """Run one sequence. ``output`` holds tokens that another router already produced for it."""

    request: str
    """Unique for this sequence."""
    trace: str
    """The client's X-Request-Id, for the logs."""
    prompt: tuple[int, ...]
    sampling: Sampling
    output: tuple[int, ...] = ()
    priority: int = 0
    deadline_ms: int = 0
    """Milliseconds from receipt after which the router gives it up; 0 for none."""


class Cancel(_Message, frozen=True, kw_only=True):
    requests: tuple[str, ...]


class Ping(_Message, frozen=True, kw_only=True):
    """Sent by a gateway once a second; a router drops the requests of one that falls silent."""

    gateway: str
    incarnation: int


ToRouter = Submit | Cancel | Ping


class Logprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of ``token`` and the most likely alternatives ``[(token, logprob)]``."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Delta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """New tokens of one sequence. The last delta of a sequence carries ``finish``."""

    request: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[Logprob, ...] = ()
    """One per token when asked for."""
    prompt_logprobs: tuple[Logprob | None, ...] = ()
    """In the first delta when asked for; one per prompt token, the first is None."""
    finish: FinishReason | None = None
    stop_token: int = -1
    """The stop token that ended it (never part of ``tokens``), or -1."""
    error: str = ""
    cached_tokens: int = 0
    """In the first delta: prompt tokens found in the prefix cache."""
    error_kind: str = ""
    """``unavailable``: expert workers were missing, trying again later can help. Else empty."""


class Tokens(_Message, frozen=True, kw_only=True):
    """Everything one step produced for one gateway."""

    step: int
    deltas: tuple[Delta, ...]


class Rejected(_Message, frozen=True, kw_only=True):
    """The router cannot take the request now (queue full, draining, too long)."""

    request: str
    reason: str
    retry_after_s: float = 0.0
    """0: trying again cannot help."""
    not_ready: bool = False
    """The router takes no sequence at all now (it loads, drains, or misses experts), as its next
    ``Pong`` says too. False: it has no room, or cannot run this one."""


class Pong(_Message, frozen=True, kw_only=True):
    """Answer to ``Ping``: what the gateway routes by."""

    router: str
    incarnation: int
    ready: bool
    reason: str
    load: Load


FromRouter = Tokens | Rejected | Pong
