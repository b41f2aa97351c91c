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
    """How many processes of each role ``moemesh up`` starts. The planner waits for ``experts``
    expert workers before it places experts for the first time. At most: 64 gateways,
    expert.max_lanes routers, and one worker for each slot of a layer (its experts +
    planner.redundant_slots)."""
    drain_timeout_s: float = 60.0
    """How long a process that was told to leave (SIGTERM) goes on at most: a router until its
    sequences have ended (it hands over the rest), an expert worker until its experts are elsewhere.
    A gateway cannot hand its streams over: it ends them by ``gateway.request_timeout_s``."""


DataPlane = Literal["auto", "shm", "tcp", "gloo", "nccl", "symm"]


class NetworkSettings(_Section, frozen=True, kw_only=True):
    data_plane: DataPlane = "auto"
    """How activations travel between a router and an expert worker. auto: in shared memory where
    both are on one host, else over TCP. shm: in shared memory, on one host. tcp: over TCP, for
    which expert workers need ``listen``. The others must be the same for all processes. gloo:
    through torch.distributed; expert workers need ``listen``. nccl: the same from one GPU's memory
    into another's; needs router.device and expert.device = cuda, and ``listen``. symm: in memory
    that the GPUs of one host address together; needs both devices = cuda, or both interpreter. No
    card has tried nccl and symm. Lanes between hosts are not encrypted: see docs/security.md."""
    listen: str = ""
    """Where this process listens for other hosts: an address, a host name or an interface (eth1).
    Routers take requests there, expert workers lanes and requests for experts; the planner listens
    there instead of on the host of ``mesh.planner``. Empty: only this host reaches routers and
    expert workers, at sockets in the run directory."""
    advertise: str = ""
    """The host or address by which others reach this process, where that is not the one it listens
    on. Empty: that one."""
    ports: str = ""
    """Ports to listen on, LOW-HIGH: each socket takes the first that is free, two an expert worker,
    one a router (one more each for metrics on a host beyond loopback). Empty: any free ones."""
    host_id: str = ""
    """Processes of one value are on one host. Empty: the kernel says. Set it where that misleads,
    as for containers that share a kernel but no run directory."""
    lane_silence_ms: int = 3_000
    """A peer that says nothing over TCP for so long, not even that it lives, has lost its lane:
    what it owes is sent elsewhere. Both ends must use the same value."""


class ModelSettings(_Section, frozen=True, kw_only=True):
    path: str = ""
    """Directory of a Hugging Face checkpoint. Empty: the model that ships with moemesh."""
    name: str = ""
    """Model id in the API. Empty: the directory's name."""
    weights: Literal["auto", "fp32", "fp16"] = "auto"
    """How matrices are kept. fp16: half the memory traffic, fp32 arithmetic; lossless for bf16
    checkpoints whose values lie in fp16's range. auto: fp16 where that is lossless, else fp32.
    Where bf16 is lossless and the CPU has a matrix unit for it (AMX), bf16 takes fp16's place."""
    exact: bool = False
    """Bit-identical output whatever the batch, placement, chunking, moves and failures, for
    more traffic and slower attention. See
    docs/adr/0005-exact-mode.md."""


class GatewaySettings(_Section, frozen=True, kw_only=True):
    host: str = "127.0.0.1"
    port: int = 8000
    """Where it listens. The i-th gateway that ``moemesh up`` starts listens on port + i. 0: any
    free port."""
    api_keys_file: str = ""
    """TOML file with the hashes and limits of the keys that clients may use (``moemesh apikey``
    makes them). Keys can also come from the environment, MOEMESH_API_KEYS. Neither: no client
    needs a key."""
    admin_key_file: str = ""
    """The same for ``/admin``; or MOEMESH_ADMIN_KEY. Neither: ``/admin`` is answered on a loopback
    host only."""
    allow_anonymous: bool = False
    """Answer clients without a key where keys are configured, or on a host beyond loopback where
    none are. They share one place among the tenants."""
    tls_cert: str = ""
    """PEM file with the server's certificate and its chain; serves https. Needs ``tls_key``."""
    tls_key: str = ""
    """PEM file with its private key, not encrypted."""
    max_queue: int = 256
    """Sequences admitted and not finished; beyond it clients get 429 with Retry-After. A tenant
    (an API key) may always hold its share by weight, so that others cannot fill the queue for it;
    all tenants together hold at most twice as many, and one each."""
    max_connections: int = 1024
    """Open client connections; beyond it new ones get 503. Each may hold up to 64 KiB of head."""
    max_body_bytes: int = 4_194_304
    """A request's body; 16 times as much for all bodies that are being read."""
    request_timeout_s: float = 600.0
    """A request that takes longer ends with an error. Clients may ask for less with the header
    X-Request-Timeout, in seconds."""
    router_wait_s: float = 10.0
    """How long a request waits for a ready router before 503."""


class RouterSettings(_Section, frozen=True, kw_only=True):
    device: str = "cpu"
    """Where attention, gate, shared experts and dense layers are computed and the KV cache is kept:
    cpu, cuda, cuda:N or interpreter, as expert.device. On a GPU weights and cache are bf16, or fp32
    with model.weights = "fp32". With tp > 1 rank i takes the i-th GPU from this one on."""
    tp: int = 1
    """Processes that compute one router's attention, shared experts and dense layers together, on
    one host, each with its part of the weights: tensor parallelism. The model's attention heads
    must divide by it. More: less memory and computing in each, and two exchanges a layer between
    them (some 20 microseconds each for few tokens, where cores are free)."""
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
    """Memory of the KV cache, in each of the ``tp`` processes: at least that of one sequence of the
    model's full context, or the router does not start. 0: room for 16 such sequences within 1 GiB,
    and for one in any case."""
    prefix_cache: bool = True
    """Share the KV blocks of equal prompt beginnings."""
    micro_batches: Literal["auto", "1", "2", "3", "4"] = "auto"
    """Micro-batches of a step that ping-pong between attention and experts. auto: 2 when
    max(t_attn, 2 t_exp(b/2)) < t_attn + t_exp(b) by measured times, else 1."""
    ahead: Literal["auto", "on", "off"] = "auto"
    """Whether a router of one process (tp = 1) goes through decode steps of up to 64 sequences
    without Python in each layer, while every expert has a worker that answers. On the CPU C does:
    over lanes in shared memory, for latent attention (with 16-bit weights; in small models of up to
    4 sequences), fp32 on the wire, not exact, and where the step is one micro-batch. Over the symm
    plane the router's device does; such a step is one micro-batch and splits an expert's tokens
    evenly over its replicas. auto: unless router.device and expert.device are one GPU, where the
    kernels that wait and those of the experts would take turns. off: Python chooses routes in each
    layer."""
    threads: int = 1
    """Threads of tensor operations. More than one pays only on idle cores."""
    matrix_threads: int = 0
    """Threads of products with large 16-bit matrices while none of the router's tokens is with the
    experts: those of this host have cores to spare then. 0: one for each core that the process may
    use, divided by mesh.routers and tp, at most 4. Never fewer than threads."""
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
    device: str = "cpu"
    """Where experts are kept and computed: cpu, cuda (the first GPU that the process sees), cuda:N,
    or interpreter: the GPU's kernels on the CPU by Triton's interpreter, to check them, thousands
    of times slower. See docs/devices.md."""
    weights: Literal["auto", "bf16", "fp8"] = "auto"
    """How experts are kept on a device (on a CPU model.weights says so). bf16: whatever the
    checkpoint's type. fp8: e4m3 with a scale for each 128 x 128 weights and each 128 activations,
    as DeepSeek-V3 computes: half the memory, coarser; an FP8 checkpoint's values as they are,
    others quantised when they are loaded. auto: fp8 for an FP8 checkpoint, else bf16; needs
    model.weights = "auto", which otherwise speaks of routers alone."""
    threads: int = 1
    """Threads of the grouped FFN."""
    cpus: str = "auto"
    """The CPUs on which a worker computes that has no device; what else it does goes anywhere. Left
    to itself, Linux often wakes several workers on one core beside an idle one; a bound one waits
    for its CPU when another program takes it. auto: ``moemesh up`` divides the CPUs that it may use
    evenly among its workers as they start, if there are several, and no more of them than CPUs; one
    whose share has fewer CPUs than ``threads`` is not bound, nor one that was started otherwise.
    any: not bound. Else CPUs as taskset and systemd list them, 0-3,8, for each worker that reads
    this."""
    slots_per_layer: int = 0
    """Most slots per MoE layer that a worker offers. 0: as many as the planner gives it."""
    speed: float = 1.0
    """How fast this worker computes, relative to its peers: it is given as much of the load."""
    max_lanes: int = 64
    """Most routers that a worker serves."""


class PlannerSettings(_Section, frozen=True, kw_only=True):
    policy: Literal["mesh", "hierarchical", "global", "threshold", "uniform"] = "mesh"
    """How experts are placed by load. mesh: ours. hierarchical, global: DeepSeek's EPLB. threshold:
    one replica more or less at a time. uniform: never by load."""
    mode: Literal["off", "advise", "auto"] = "auto"
    """off: no plans. advise: plans are made and reported, nothing moves. auto: carried out."""
    redundant_slots: int = 0
    """Physical slots per MoE layer beyond the number of logical experts. A worker holds an expert
    once: of more than (workers - 1) x experts the rest is left out, and an alarm says so."""
    spare_slots: int = 1
    """Empty slots per rank and MoE layer in which experts are loaded before they serve. More: fewer
    rounds a move, more memory while it lasts."""
    initial_placement: str = ""
    """A file (or inline JSON) with the placement to start from: SGLang's, TensorRT-LLM's or
    vllm-ascend's format. trivial (SGLang's word): uniform, whatever the last plan was. Empty: the
    last plan of this mesh if it fits, else uniform."""
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
    """Pause between the reports of each member."""
    suspect_after_ms: int = 1_200
    """Silence after which a member is suspect: what only it holds is placed elsewhere too. Shorter:
    less of a pause when a worker hangs, more moves for nothing on a busy machine."""
    dead_after_ms: int = 5_000
    """Silence after which a member is dead and its incarnation fenced."""
    first_placement_wait_s: float = 60.0
    """How long to wait for ``mesh.experts`` workers before placing on those that came."""


class SecuritySettings(_Section, frozen=True, kw_only=True):
    curve_dir: str = ""
    """Directory with ``ID.key`` for each process of this host and ``allow.toml``, as ``moemesh
    keygen`` makes them. If set, every TCP socket of the mesh is encrypted, takes listed keys only,
    and each key may do what its role needs. Empty: TCP stays within this machine."""
    key_file: str = ""
    """This process's key, where it is not ``curve_dir/ID.key``."""
    allow_file: str = ""
    """The list of keys, where it is not ``curve_dir/allow.toml``."""
    allow_insecure: bool = False
    """Use TCP beyond this machine without keys. Whoever reaches a port can then command the mesh
    and read all prompts."""


class LogSettings(_Section, frozen=True, kw_only=True):
    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe events that are logged."""
    format: Literal["auto", "console", "json"] = "auto"
    """auto: console on a terminal, else JSON lines."""


class MetricsSettings(_Section, frozen=True, kw_only=True):
    enabled: bool = True
    """Serve Prometheus metrics per process: the gateway at ``/metrics``, others on a loopback
    port of their own (``moemesh status --json`` lists them)."""
    host: str = "127.0.0.1"


class Settings(_Section, frozen=True, kw_only=True):
    mesh: MeshSettings = MeshSettings()
    network: NetworkSettings = NetworkSettings()
    model: ModelSettings = ModelSettings()
    gateway: GatewaySettings = GatewaySettings()
    router: RouterSettings = RouterSettings()
    expert: ExpertSettings = ExpertSettings()
    planner: PlannerSettings = PlannerSettings()
    logs: LogSettings = LogSettings()
    metrics: MetricsSettings = MetricsSettings()
    security: SecuritySettings = SecuritySettings()
