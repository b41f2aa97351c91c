"""Control messages: frozen tagged msgspec Structs, one union per direction.

A field is only ever added with a default and never retyped, so that neighbouring protocol
versions read each other's bytes (golden bytes in ``tests/unit/mesh/test_messages.py``).

Directions
    member  -> planner   ``ToPlanner``
    planner -> member    ``FromPlanner``     (``View`` is also what the planner broadcasts)
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
    """Why the member is not ready, in words; empty when ready."""
    progress: float = 1.0
    """Share of the weights that it has loaded, 0 to 1."""
    load: Load | None = None


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
    protocol_min: int = PROTOCOL_MIN
    protocol_max: int = PROTOCOL_MAX
    control: str = ""
    lanes: str = ""
    metrics: str = ""
    num_slots: int = 0
    """Expert: the most slots per MoE layer that it can hold (0: as many as it is given)."""
    placement: Placement | None = None
    """Newest placement the member knows (``mesh.member`` fills it in), from which a restarted
    planner rebuilds its own and learns that the mesh is older than itself."""


class Heartbeat(_Message, frozen=True, kw_only=True):
    id: str
    incarnation: int
    state: MemberState
    load: Load
    detail: str = ""
    progress: float = 1.0
    view_version: int = 0
    """Newest view the member has; the planner answers with a ``View`` when that is old."""


class SlotsReady(_Message, frozen=True, kw_only=True):
    """Acknowledges ``AssignSlots``: the rank now holds what it was told to, or says why not."""

    id: str
    incarnation: int
    command: int
    epoch: int
    error: str = ""


class LoadReport(_Message, frozen=True, kw_only=True):
    """Real tokens per logical expert, counted at the sender since its last report.

    ``counts[i][e]``: tokens routed to logical expert ``e`` of MoE layer ``moe_layers[i]``.
    """

    id: str
    incarnation: int
    counts: tuple[tuple[int, ...], ...]
    tokens: int = 0


class Goodbye(_Message, frozen=True, kw_only=True):
    """The member stops of its own will; it holds nothing any more."""

    id: str
    incarnation: int
    reason: str = ""


class GetView(_Message, frozen=True, kw_only=True):
    """Any role: ask for the newest ``View``."""


class GetStatus(_Message, frozen=True, kw_only=True):
    """Admin: ask for ``Status``."""


ToPlanner = Hello | Heartbeat | SlotsReady | LoadReport | Goodbye | GetView | GetStatus


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


class AssignSlots(_Message, frozen=True, kw_only=True):
    """Expert: hold exactly this. ``slots[i][s]``: logical expert for local slot ``s`` of MoE
    layer ``moe_layers[i]``. Idempotent: repeated until ``SlotsReady`` carries ``command``.
    """

    command: int
    epoch: int
    moe_layers: tuple[int, ...]
    slots: tuple[tuple[int, ...], ...]


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


FromPlanner = Welcome | Refused | Unknown | AssignSlots | View | Status


# ---------------------------------------------------------------- gateway <-> router


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
