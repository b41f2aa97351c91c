"""One effective configuration out of four sources: defaults < TOML < environment < flags.

API
    ``load(config, overrides, environ) -> Effective``: ``Effective.settings`` is what services
    read; ``Effective.origin["router.max_running"]`` says where that value came from:
    ``default``, ``file PATH``, ``environment MOEMESH_ROUTER_MAX_RUNNING`` or ``flag --x``.
    ``ConfigError`` names key, value, what was expected and the source.
    ``knobs() -> tuple[Knob, ...]``: every key with its type and default, for listings.
    ``assignment(text)``: what services' ``--set`` takes.

The environment variable of a key is ``MOEMESH_SECTION_KEY``. ``MOEMESH_CONFIG`` names the TOML
file when no flag does. An unknown key, a variable with our prefix that means nothing, or a value
out of range is an error: an option that nobody reads must not look as if it worked.

Pure but for reading the one file that it is given.
"""

from __future__ import annotations

import argparse
import difflib
import re
import tomllib
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from mesh.addresses import NEEDS_KEYS, WILDCARDS, address_fault, is_loopback, leaves_host, ports_of
from mesh.cpus import ANY, AUTO, is_choice
from mesh.settings import Settings

ENV_PREFIX = "MOEMESH_"
CONFIG_VARIABLE = "MOEMESH_CONFIG"
API_KEYS_VARIABLE = "MOEMESH_API_KEYS"
ADMIN_KEY_VARIABLE = "MOEMESH_ADMIN_KEY"
SECRET_VARIABLES = (API_KEYS_VARIABLE, ADMIN_KEY_VARIABLE)
"""Read by the gateway itself: what they hold is no setting and is shown nowhere."""
API_KEY_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
API_KEY_NAME_EXPECTED = "expected 1 to 64 letters, digits or any of . _ @ -"
MAX_GATEWAYS = 64
"""All that a launcher starts share one host, and one gateway serves hundreds of clients."""
NAME_EXPECTED = "expected 1 to 40 letters, digits, '-' or '_'"


class ConfigError(ValueError):
    """A value from the user that cannot be used; the service does not start.

    Attributes: ``key`` (``section.key``, or the file), ``value``, ``expected`` and ``source``.
    """

    def __init__(self, key: str, value: object, expected: str, source: str) -> None:
        shown = "" if value is None else f" = {value!r}"
        super().__init__(f"{key}{shown} ({source}): {expected}")
        self.key = key
        self.value = value
        self.expected = expected
        self.source = source


class Effective(msgspec.Struct, frozen=True):
    """The merged settings and, for each ``section.key``, the source that decided it."""

    settings: Settings
    origin: dict[str, str]


class Knob(msgspec.Struct, frozen=True):
    """One configurable value: ``key`` is ``section.key``."""

    key: str
    type: Any
    default: Any

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return ENV_PREFIX + self.key.replace(".", "_").upper()

    @property
    def accepts(self) -> str:
        """The accepted type in words."""
        if typing.get_origin(self.type) is Literal:
            return "one of " + ", ".join(repr(choice) for choice in typing.get_args(self.type))
        return {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}[
            self.type
        ]


def knobs() -> tuple[Knob, ...]:
    """Every ``section.key`` in the order of ``Settings``."""
    return tuple(
        Knob(f"{section.name}.{field.name}", field.type, field.default)
        for section in msgspec.structs.fields(Settings)
        for field in msgspec.structs.fields(section.type)
    )


def load(
    config: Path | None,
    overrides: Mapping[str, str],
    environ: Mapping[str, str],
    *,
    flag_names: Mapping[str, str] | None = None,
) -> Effective:
    """Merge the sources and validate the result.

    ``overrides`` maps ``section.key`` to text, as ``--set section.key=text`` gave it;
    ``flag_names`` names the flag of a key for messages where it was another (``--port``).
    Raises ``ConfigError``.
    """
    by_key = {knob.key: knob for knob in knobs()}
    values = {knob.key: knob.default for knob in by_key.values()}
    origin = dict.fromkeys(by_key, "default")

    def put(key: str, value: object, source: str, *, text: bool) -> None:
        values[key] = _convert(by_key[key], value, source, text=text)
        origin[key] = source

    path = config
    if path is None and environ.get(CONFIG_VARIABLE):
        path = Path(environ[CONFIG_VARIABLE])
    if path is not None:
        for key, value in _read_file(path, by_key).items():
            put(key, value, f"file {path}", text=False)

    by_variable = {knob.variable: knob.key for knob in by_key.values()}
    for variable in sorted(environ):
        if not variable.startswith(ENV_PREFIX) or variable in {CONFIG_VARIABLE, *SECRET_VARIABLES}:
            continue
        source = f"environment {variable}"
        if variable not in by_variable:
            head, _, tail = variable.removeprefix(ENV_PREFIX).lower().partition("_")
            secret = close_name(variable, SECRET_VARIABLES)
            expected = "no such setting" + (
                f"; did you mean {secret}?"
                if secret
                else _suggest_key(f"{head}.{tail}", by_key, lambda key: by_key[key].variable)
            )
            # Its value is not shown: it may be the key that a misspelled variable was to hold.
            raise ConfigError(variable, None, expected, source)
        put(by_variable[variable], environ[variable], source, text=True)

    for key, value in overrides.items():
        source = f"flag {(flag_names or {}).get(key, '--set ' + key)}"
        if key not in by_key:
            raise ConfigError(key, value, "no such setting" + _suggest_key(key, by_key), source)
        put(key, value, source, text=True)

    _check_values(values, origin)
    nested: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, name = key.split(".")
        nested.setdefault(section, {})[name] = value
    return Effective(msgspec.convert(nested, Settings), origin)


def assignment(text: str) -> tuple[str, str]:
    """``section.key=text`` in two, for ``argparse``."""
    key, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r}: expected SECTION.KEY=VALUE")
    return key.strip(), value.strip()


def _read_file(path: Path, by_key: Mapping[str, Knob]) -> dict[str, Any]:
    """``section.key -> value`` of a TOML file with one table per section."""
    source = f"file {path}"
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(str(path), None, f"cannot be read: {error.strerror}", source) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(str(path), None, f"is not TOML: {error}", source) from None
    sections = dict.fromkeys(key.split(".")[0] for key in by_key)
    found: dict[str, Any] = {}
    for section, table in tables.items():
        if section not in sections:
            raise ConfigError(
                f"[{section}]", None, "no such section" + _suggest(section, sections), source
            )
        if not isinstance(table, dict):
            raise ConfigError(section, table, f"expected a table, written [{section}]", source)
        for name, value in table.items():
            key = f"{section}.{name}"
            if key not in by_key:
                raise ConfigError(key, value, "no such setting" + _suggest_key(key, by_key), source)
            found[key] = value
    return found


def _convert(knob: Knob, value: object, source: str, *, text: bool) -> Any:
    if typing.get_origin(knob.type) is Literal and type(value) is int:
        value = str(value)  # micro_batches = 2 reads as well as "2"
    try:
        return msgspec.convert(value, knob.type, strict=not text)
    except msgspec.ValidationError:
        raise ConfigError(knob.key, value, f"expected {knob.accepts}", source) from None


def close_name(name: str, known: Iterable[str]) -> str | None:
    """The one of ``known`` that ``name`` is likely to be a slip of the keyboard for, if any."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.75)
    return close[0] if close else None


def _suggest(name: str, known: Mapping[str, object]) -> str:
    close = close_name(name, known)
    return f"; did you mean {close}?" if close else ""


def _suggest_key(key: str, known: Iterable[str], shown: Callable[[str], str] = str) -> str:
    """``shown`` of the setting that ``key`` was perhaps meant to be. The section alone makes no
    two names alike: ``router.foo`` is not close to ``router.wire``.
    """
    section, _, name = key.partition(".")
    names: dict[str, dict[str, str]] = {}
    for candidate in known:
        head, tail = candidate.split(".")
        names.setdefault(head, {})[tail] = candidate
    own = names.get(section) or names.get(close_name(section, names) or "", {})
    # The right key in the wrong section is the commonest slip.
    elsewhere = [table[name] for table in names.values() if name in table]
    close = close_name(name, own)
    found = own[close] if close else elsewhere[0] if elsewhere else None
    return f"; did you mean {shown(found)}?" if found else ""


# ---------------------------------------------------------------- rules on values


class _Rule(msgspec.Struct, frozen=True):
    accepts: Callable[[Any], bool]
    expected: str


_POSITIVE = _Rule(lambda v: 0 < v < float("inf"), "expected more than 0")
_NOT_NEGATIVE = _Rule(lambda v: 0 <= v < float("inf"), "expected 0 or more")
_PORT = _Rule(lambda v: 0 <= v <= 65535, "expected a port, 0 to 65535 (0: any free one)")
_HOST = _Rule(bool, "expected a host name or address")
_NAME = _Rule(lambda v: not name_fault(v), NAME_EXPECTED)
_DEVICE = _Rule(
    lambda v: re.fullmatch("cpu|interpreter|cuda(:[0-9]{1,3})?", v) is not None,
    "expected cpu, cuda, cuda:N or interpreter",
)


def _are_ports(text: str) -> bool:
    try:
        return text == "" or ports_of(text)[0] > 0
    except ValueError:
        return False


_RULES: Mapping[str, _Rule] = {
    "mesh.name": _NAME,
    "mesh.gateways": _Rule(lambda v: 0 < v <= MAX_GATEWAYS, f"expected 1 to {MAX_GATEWAYS}"),
    "mesh.routers": _POSITIVE,
    "mesh.experts": _POSITIVE,
    "mesh.drain_timeout_s": _NOT_NEGATIVE,
    "network.ports": _Rule(_are_ports, "expected ports as LOW-HIGH, or one"),
    "network.lane_silence_ms": _Rule(lambda v: v >= 200, "expected 200 or more"),
    "gateway.host": _HOST,
    "gateway.port": _PORT,
    "gateway.max_queue": _POSITIVE,
    "gateway.max_connections": _POSITIVE,
    "gateway.max_body_bytes": _POSITIVE,
    "gateway.request_timeout_s": _POSITIVE,
    "gateway.router_wait_s": _NOT_NEGATIVE,
    "router.device": _DEVICE,
    "router.tp": _POSITIVE,
    "router.max_step_tokens": _POSITIVE,
    "router.max_running": _POSITIVE,
    "router.max_waiting": _POSITIVE,
    "router.block_size": _POSITIVE,
    "router.kv_cache_bytes": _NOT_NEGATIVE,
    "router.threads": _POSITIVE,
    "router.matrix_threads": _Rule(lambda v: 0 <= v <= 256, "expected 0 to 256"),
    "router.capacity_tokens": _POSITIVE,
    "router.expert_timeout_s": _POSITIVE,
    "expert.device": _DEVICE,
    "expert.threads": _POSITIVE,
    "expert.cpus": _Rule(is_choice, f"expected {AUTO}, {ANY}, or CPUs, such as 0-3,8"),
    "expert.slots_per_layer": _NOT_NEGATIVE,
    "expert.max_lanes": _POSITIVE,
    "planner.redundant_slots": _NOT_NEGATIVE,
    "planner.spare_slots": _NOT_NEGATIVE,
    "planner.interval_s": _POSITIVE,
    "planner.window_s": _POSITIVE,
    "planner.window_buckets": _Rule(lambda v: 0 < v <= 600, "expected 1 to 600"),
    "planner.min_window_tokens": _NOT_NEGATIVE,
    "planner.horizon_s": _POSITIVE,
    "planner.min_gain": _Rule(lambda v: 0 <= v < 1, "expected a share: 0 or more, less than 1"),
    "planner.move_bytes_per_s": _NOT_NEGATIVE,
    "planner.move_slots": _POSITIVE,
    "planner.phase_timeout_s": _POSITIVE,
    "planner.hot_factor": _POSITIVE,
    "planner.cold_factor": _NOT_NEGATIVE,
    "planner.heartbeat_ms": _Rule(lambda v: v >= 10, "expected 10 or more"),
    "planner.suspect_after_ms": _POSITIVE,
    "planner.dead_after_ms": _POSITIVE,
    "planner.first_placement_wait_s": _NOT_NEGATIVE,
    "metrics.host": _HOST,
}


def _check_values(values: Mapping[str, Any], origin: Mapping[str, str]) -> None:
    def refuse(key: str, expected: str) -> None:
        raise ConfigError(key, values[key], expected, origin[key])

    for key, rule in _RULES.items():
        if not rule.accepts(values[key]):
            refuse(key, rule.expected)
    keys = values["security.curve_dir"] or (
        values["security.key_file"] and values["security.allow_file"]
    )
    for key in ("mesh.planner", "mesh.broadcast"):
        if values[key] and (expected := address_fault(values[key])):
            refuse(key, expected)
        if leaves_host(values[key]) and not keys and not values["security.allow_insecure"]:
            refuse(key, f"expected a loopback host, or {NEEDS_KEYS}")
    if leaves_host(values["mesh.planner"]) and not leaves_host(values["mesh.broadcast"]):
        refuse(
            "mesh.broadcast",
            f"expected an address that members on other hosts reach, as mesh.planner = "
            f"{values['mesh.planner']!r} is one",
        )
    listen = values["network.listen"]
    if listen and not is_loopback(listen) and not keys and not values["security.allow_insecure"]:
        refuse("network.listen", f"expected a loopback host, or {NEEDS_KEYS}")
    if listen in WILDCARDS and not values["network.advertise"]:
        refuse("network.listen", "expected network.advertise as well: members cannot connect to it")
    for key in ("network.advertise", "network.ports"):
        if values[key] and not listen:
            refuse(key, "expected network.listen as well")
    if values["mesh.planner"] and values["mesh.planner"] == values["mesh.broadcast"]:
        refuse("mesh.broadcast", "expected another address than mesh.planner")
    for key in (
        "mesh.run_dir",
        "mesh.state_dir",
        "security.curve_dir",
        "security.key_file",
        "security.allow_file",
    ):
        if values[key] and not Path(values[key]).is_absolute():
            refuse(key, "expected an absolute path")
    if values["gateway.port"] and values["gateway.port"] + values["mesh.gateways"] > 65536:
        refuse(
            "gateway.port",
            f"expected at most {65536 - values['mesh.gateways']}: the last of mesh.gateways = "
            f"{values['mesh.gateways']} listens on port + {values['mesh.gateways'] - 1}",
        )
    for key, other in (("tls_cert", "tls_key"), ("tls_key", "tls_cert")):
        if values[f"gateway.{key}"] and not values[f"gateway.{other}"]:
            refuse(f"gateway.{key}", f"expected gateway.{other} as well")
    if values["mesh.routers"] > values["expert.max_lanes"]:
        refuse(
            "mesh.routers",
            f"expected at most expert.max_lanes = {values['expert.max_lanes']}: "
            "each router has a lane to each expert worker",
        )
    if values["router.max_running"] > values["router.max_step_tokens"]:
        refuse(
            "router.max_running",
            f"expected at most router.max_step_tokens = {values['router.max_step_tokens']}: "
            "each running sequence takes one token of a step",
        )
    for key in ("router.device", "expert.device"):
        if values[key] != "cpu" and values["model.exact"]:
            refuse(key, "expected cpu: model.exact = true is kept on CPUs alone")
    if values["expert.device"] == "cpu":
        if values["expert.weights"] != "auto":
            refuse("expert.weights", "expected auto, or expert.device other than cpu")
    elif values["expert.weights"] == "auto" and values["model.weights"] != "auto":
        refuse("expert.device", "expected cpu, model.weights = 'auto', or expert.weights as well")
    if values["expert.device"] != "cpu" and values["expert.cpus"] not in (AUTO, ANY):
        refuse("expert.cpus", f"expected {AUTO} or {ANY}, or expert.device = 'cpu'")
    if values["router.device"] != "cpu" and values["model.weights"] == "fp16":
        refuse("router.device", "expected cpu, or model.weights = 'auto' (bf16) or 'fp32'")
    if values["planner.cold_factor"] > values["planner.hot_factor"] / 2:
        refuse(
            "planner.cold_factor",
            f"expected at most half of planner.hot_factor = {values['planner.hot_factor']}, or a "
            "replica that one plan adds the next one takes away",
        )
    heartbeat = values["planner.heartbeat_ms"]
    if values["planner.suspect_after_ms"] < 2 * heartbeat:
        refuse(
            "planner.suspect_after_ms",
            f"expected at least 2 x planner.heartbeat_ms = {2 * heartbeat}, "
            "or one late heartbeat makes a suspect",
        )
    if values["planner.dead_after_ms"] <= values["planner.suspect_after_ms"]:
        refuse(
            "planner.dead_after_ms",
            f"expected more than planner.suspect_after_ms = {values['planner.suspect_after_ms']}",
        )


def name_fault(name: str) -> str:
    """What is wrong with the name of a mesh or the id of a member (both name files), in words;
    empty when it can be used.
    """
    short = 0 < len(name) <= 40
    plain = all(c.isascii() and (c.isalnum() or c in "-_") for c in name)
    return "" if short and plain else NAME_EXPECTED
