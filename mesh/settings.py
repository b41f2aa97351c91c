"""What one TOML file says about a mesh: every knob, its default, formula and trade-off.

Pure data. ``mesh.config`` reads and merges the sources (defaults < TOML < environment < flags).
"""

from __future__ import annotations

from typing import Literal

import msgspec


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class MeshSettings(_Section, frozen=True, kw_only=True):
    name: str = "default"
    """Names the mesh; two meshes on one host need two names."""
    run_dir: str = ""
    """Directory (mode 0700) of sockets and pid files. Empty: ``$XDG_RUNTIME_DIR/moemesh/NAME``,
    or ``/tmp/moemesh-UID/NAME``."""
    state_dir: str = ""
    """Directory of what outlives the mesh: the last plan. Empty:
    ``$XDG_STATE_HOME/moemesh/NAME``, or ``~/.local/state/moemesh/NAME``."""
    planner: str = ""
    """ZeroMQ address of the planner's command socket. Empty: ``ipc://RUN_DIR/planner.sock``."""
    broadcast: str = ""
    """Address of the planner's broadcasts. Empty: ``ipc://RUN_DIR/broadcast.sock``."""
    gateways: int = 1
    routers: int = 1
    experts: int = 2
    """How many of each the launcher starts; the planner waits for this many expert workers
    before the first placement."""


class ModelSettings(_Section, frozen=True, kw_only=True):
    path: str = ""
    """Directory of a Hugging Face checkpoint. Empty: the model that ships with moemesh."""
    name: str = ""
    """Model id in the API. Empty: the directory's name."""
    weights: Literal["auto", "fp32", "fp16"] = "auto"
    """How matrices are kept. fp16: half the memory traffic, fp32 arithmetic; lossless for bf16
    checkpoints whose values lie in fp16's range. auto: fp16 where that is lossless, else fp32."""
    exact: bool = False
    """Bit-identical output whatever the batch, placement, chunking, moves and failures, for
    more traffic and slower attention. See docs/adr."""


class GatewaySettings(_Section, frozen=True, kw_only=True):
    host: str = "127.0.0.1"
    port: int = 8000
    max_queue: int = 256
    """Sequences admitted and not finished; beyond it clients get 429 with Retry-After."""
    max_body_bytes: int = 4_194_304
    request_timeout_s: float = 600.0
    """A request that takes longer ends with an error."""
    router_wait_s: float = 10.0
    """How long a request waits for a ready router before 503."""


class RouterSettings(_Section, frozen=True, kw_only=True):
    max_step_tokens: int = 512
    """Token budget of one engine step (decode tokens first, then prefill chunks). More: better
    prefill throughput; less: steadier inter-token latency."""
    max_running: int = 64
    """Sequences that share a step; also the largest decode batch."""
    max_waiting: int = 256
    """Sequences waiting in this router; beyond it it answers ``Rejected``."""
    block_size: int = 16
    """Tokens per KV block."""
    kv_cache_bytes: int = 0
    """Memory of the KV cache. 0: room for 16 full-length sequences, at most 1 GiB."""
    prefix_cache: bool = True
    micro_batches: Literal["auto", "1", "2", "3", "4"] = "auto"
    """Micro-batches of a step that ping-pong between attention and experts. auto: 2 when
    max(t_attn, 2 t_exp(b/2)) < t_attn + t_exp(b) by measured times, else 1."""
    threads: int = 1
    """OpenMP threads of tensor operations. More than one pays only on idle cores."""
    capacity_tokens: int = 256
    """Tokens per lane message; larger parts are split."""
    wire: Literal["fp32", "fp16", "bf16"] = "fp32"
    """Activations on the way to the experts. fp16/bf16 halve the traffic and round the input."""
    replica_choice: Literal["water-fill", "even", "least-loaded"] = "water-fill"
    """How an expert's tokens are split over its replicas. water-fill: by the batch's counts and the
    ranks' recent load, so that the fullest rank gets least. even: equally. least-loaded: all to
    the rank with least recent load."""
    record_steps: int = 4_096
    """Most steps that a recording of loads keeps; the oldest go first."""
    expert_timeout_s: float = 30.0
    """How long a micro-batch waits for an expert that nobody serves before its requests fail."""


class ExpertSettings(_Section, frozen=True, kw_only=True):
    threads: int = 1
    slots_per_layer: int = 0
    """Most slots per MoE layer that a worker offers. 0: as many as the planner gives it."""
    speed: float = 1.0
    """How fast this worker computes, relative to its peers: it is given as much of the load."""
    max_lanes: int = 64


class PlannerSettings(_Section, frozen=True, kw_only=True):
    policy: Literal["mesh", "hierarchical", "global", "threshold", "uniform"] = "mesh"
    """How experts are placed by load. mesh: ours. hierarchical, global: DeepSeek's EPLB. threshold:
    one replica more or less at a time. uniform: never by load."""
    mode: Literal["off", "advise", "auto"] = "auto"
    """off: no plans. advise: plans are made and reported, nothing moves. auto: carried out."""
    redundant_slots: int = 0
    """Physical slots per MoE layer beyond the number of logical experts."""
    spare_slots: int = 1
    """Empty slots per rank and MoE layer in which experts are loaded before they serve. More: fewer
    rounds a move, more memory while it lasts."""
    initial_placement: str = ""
    """A file (or inline JSON) with the placement to start from: SGLang's, TensorRT-LLM's or
    vllm-ascend's format. Empty: the last plan of this mesh if it fits, else uniform."""
    interval_s: float = 30.0
    """Pause between plans. Shorter follows the load faster and computes more."""
    window_s: float = 60.0
    """Loads older than this are forgotten."""
    window_buckets: int = 12
    """Steps that the window is divided into: what the forecast sees."""
    min_window_tokens: int = 1_000
    """Tokens in the window below which nothing is planned: chance is not load."""
    horizon_s: float = 300.0
    """How long a plan is expected to be of use: it is carried out when predicted gain x horizon
    exceeds its cost."""
    min_gain: float = 0.02
    """Least predicted saving, as a share of the expert time, for which anything moves."""
    move_bytes_per_s: int = 268_435_456
    """Most bytes of experts loaded a second over the whole mesh while they move; 0: no limit."""
    move_slots: int = 8
    """Most slots being loaded at once over the whole mesh while they move."""
    phase_timeout_s: float = 30.0
    """Deadline of each phase of a move; a move that misses it is undone and tried again later."""
    groups: Literal["auto", "strict", "soft", "off"] = "auto"
    """Whether the experts of a group stay on one node. auto: soft when the model routes by groups
    and the mesh has several nodes."""
    forecast: bool = True
    """Plan for the next window as predicted from trends, rather than for the last one."""
    hot_factor: float = 2.0
    """threshold: an expert above this multiple of the mean load gains a replica."""
    cold_factor: float = 0.5
    """threshold: a replicated expert below this multiple loses one."""
    heartbeat_ms: int = 500
    suspect_after_ms: int = 1_500
    """Silence after which a member is suspect."""
    dead_after_ms: int = 5_000
    """Silence after which a member is dead and its incarnation fenced."""
    first_placement_wait_s: float = 60.0
    """How long to wait for ``mesh.experts`` workers before placing on those that came."""


class LogSettings(_Section, frozen=True, kw_only=True):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "console", "json"] = "auto"
    """auto: console on a terminal, else JSON lines."""


class MetricsSettings(_Section, frozen=True, kw_only=True):
    enabled: bool = True
    """Serve Prometheus metrics per process: the gateway at ``/metrics``, others on a loopback
    port of their own (``moemesh status --json`` lists them)."""
    host: str = "127.0.0.1"


class Settings(_Section, frozen=True, kw_only=True):
    mesh: MeshSettings = MeshSettings()
    model: ModelSettings = ModelSettings()
    gateway: GatewaySettings = GatewaySettings()
    router: RouterSettings = RouterSettings()
    expert: ExpertSettings = ExpertSettings()
    planner: PlannerSettings = PlannerSettings()
    logs: LogSettings = LogSettings()
    metrics: MetricsSettings = MetricsSettings()
