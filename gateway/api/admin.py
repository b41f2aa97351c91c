"""``/admin``: the planner's placement, loads and plans, seen and steered over HTTP.

Every request is one question to the planner, with a deadline. Errors are OpenAI's error objects:
400 what cannot be meant, 404 what is not there, 409 what the planner refuses, 503 no planner.
Who may ask is not decided here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.api.http import json_response, read_body
from gateway.api.requests import parse
from gateway.api.responses import encode
from gateway.errors import ApiError, InvalidValue, NotFound, Unavailable, shown
from mesh.admin import PlannerAway, PlannerDesk, PlannerRefused, plain, present_ranks
from mesh.messages import (
    Admin,
    GetLoad,
    GetPlan,
    GetStatus,
    LoadDetail,
    Member,
    MemberState,
    Mode,
    Pin,
    Placement,
    PlanDetail,
    Rebalance,
    RecordAction,
    RecordDetail,
    RecordLoad,
    SetMode,
    Status,
)
from mesh.placement_json import PlacementDocument, PlacementJsonError, proposal, sglang_map

_RETRY_S = 2.0
"""A planner that died is back, and has found its mesh, after about this long."""
_RECORD_ACTIONS: tuple[RecordAction, ...] = ("start", "stop", "dump")

_GONE: frozenset[MemberState] = frozenset({"dead", "left"})

T = TypeVar("T", bound=msgspec.Struct)


class PlannerUnavailable(Unavailable):
    """No planner answers. Tokens flow without one, plans do not."""

    code = "planner_unavailable"


class RefusedByPlanner(ApiError):
    """Well formed, but impossible now; nothing was changed."""

    status = 409
    type = "invalid_request_error"
    code = "refused_by_planner"


class RankNotFound(NotFound):
    code = "rank_not_found"


class RebalanceRequest(msgspec.Struct, frozen=True, kw_only=True):
    force: bool = False
    """Carry the plan out even if it costs more than it gains."""


class ModeRequest(msgspec.Struct, frozen=True, kw_only=True):
    mode: Mode


class PinRequest(msgspec.Struct, frozen=True, kw_only=True):
    layer: int
    """The model's layer number."""
    expert: int
    ranks: tuple[str, ...]
    """Ids of expert workers; none: lift the pin."""


class AdminPages:
    """The endpoints. ``max_body_bytes`` as of the other endpoints."""

    def __init__(self, planner: PlannerDesk, max_body_bytes: int) -> None:
        self._planner = planner
        self._max_body_bytes = max_body_bytes

    def routes(self) -> list[Route]:
        return [
            Route("/admin/placement", self.placement, methods=["GET"]),
            Route("/admin/placement", self.place, methods=["POST"]),
            Route("/admin/load", self.load, methods=["GET"]),
            Route("/admin/plan", self.plan, methods=["GET"]),
            Route("/admin/rebalance", self.rebalance, methods=["POST"]),
            Route("/admin/mode", self.mode, methods=["POST"]),
            Route("/admin/pin", self.pin, methods=["POST"]),
            Route("/admin/record/{action}", self.record, methods=["POST"]),
            Route("/admin/targets", self.targets, methods=["GET"]),
        ]

    async def placement(self, http: Request) -> Response:
        """The placement in force; ``?format=sglang`` for ``--init-expert-location``."""
        format_ = http.query_params.get("format")
        if format_ not in {None, "sglang"}:
            raise InvalidValue(
                f"format is {shown(format_ or '')!r}; expected sglang, or none for ours.",
                param="format",
            )
        placement, _ = await self._in_force()
        if format_ is None:
            return json_response(encode(plain(placement)))
        try:
            return json_response(encode(sglang_map(placement)))
        except PlacementJsonError as error:
            raise RefusedByPlanner(f"{error}.", param=error.field) from None

    async def place(self, http: Request) -> Response:
        """Carry out an explicit placement, whatever it costs, in any mode."""
        document = parse(await self._body(http), PlacementDocument)
        placement, ranks = await self._in_force()
        try:
            question = proposal(document, placement, ranks)
        except PlacementJsonError as error:
            raise InvalidValue(f"{error}.", param=error.field) from None
        _check_ranks(question.ranks, ranks)
        return await self._answer(question, PlanDetail)

    async def load(self, http: Request) -> Response:  # noqa: ARG002
        """Real tokens of the last window, per layer and expert, prefill and decode apart."""
        return await self._answer(GetLoad(), LoadDetail)

    async def plan(self, http: Request) -> Response:  # noqa: ARG002
        """The latest plan with its gain, cost and verdict, and the move under way."""
        return await self._answer(GetPlan(), PlanDetail)

    async def rebalance(self, http: Request) -> Response:
        """Plan now."""
        body = await self._body(http)
        asked = parse(body, RebalanceRequest) if body else RebalanceRequest()
        return await self._answer(Rebalance(force=asked.force), PlanDetail)

    async def mode(self, http: Request) -> Response:
        asked = parse(await self._body(http), ModeRequest)
        return await self._answer(SetMode(mode=asked.mode), PlanDetail)

    async def pin(self, http: Request) -> Response:
        """Keep copies of an expert on these ranks, or lift the pin."""
        asked = parse(await self._body(http), PinRequest)
        placement, ranks = await self._in_force()
        if asked.layer not in placement.moe_layers:
            raise InvalidValue(
                f"layer {asked.layer} has no experts; layers "
                f"{', '.join(map(str, placement.moe_layers))} have.",
                param="layer",
            )
        if not 0 <= asked.expert < placement.num_experts:
            raise InvalidValue(
                f"expert is {asked.expert}; expected 0 to {placement.num_experts - 1}.",
                param="expert",
            )
        _check_ranks(asked.ranks, ranks)
        question = Pin(layer=asked.layer, expert=asked.expert, ranks=asked.ranks)
        return await self._answer(question, PlanDetail)

    async def record(self, http: Request) -> Response:
        """Start, stop or write out the routers' recordings of loads."""
        for action in _RECORD_ACTIONS:
            if action == http.path_params["action"]:
                return await self._answer(RecordLoad(action=action), RecordDetail)
        raise NotFound(
            f"There is nothing at {http.url.path}; expected {', '.join(_RECORD_ACTIONS)}."
        )

    async def targets(self, http: Request) -> Response:  # noqa: ARG002
        """Where each process of the mesh serves its metrics, as Prometheus' ``http_sd_configs``
        wants it.
        """
        view = (await self._ask(GetStatus(), Status)).view
        here = [m for m in view.members if m.metrics and m.state not in _GONE]
        return json_response(msgspec.json.encode([_target(member) for member in here]))

    async def _body(self, http: Request) -> bytes:
        return await read_body(http, self._max_body_bytes)

    async def _answer(self, question: Admin, want: type[msgspec.Struct]) -> Response:
        return json_response(encode(plain(await self._ask(question, want))))

    async def _ask(self, question: Admin | GetStatus, want: type[T]) -> T:
        try:
            return await self._planner.ask(question, want)
        except PlannerAway as error:
            raise PlannerUnavailable(f"{error}.", retry_after_s=_RETRY_S) from None
        except PlannerRefused as error:
            raise RefusedByPlanner(f"{error.reason.rstrip('.')}.") from None

    async def _in_force(self) -> tuple[Placement, list[str]]:
        """The committed placement, and the expert workers that are there: its ranks come first."""
        view = (await self._ask(GetStatus(), Status)).view
        if view.placement is None:
            raise Unavailable("Nothing is placed yet: the expert workers are still loading.")
        return view.placement, present_ranks(view)


def _target(member: Member) -> dict[str, object]:
    parts = urlsplit(member.metrics)
    labels = {
        "role": member.role,
        "member": member.id,
        "__scheme__": parts.scheme,
        "__metrics_path__": parts.path,
    }
    return {"targets": [parts.netloc], "labels": labels}


def _check_ranks(named: Sequence[str], present: Sequence[str]) -> None:
    for name in named:
        if name not in present:
            raise RankNotFound(
                f"No expert worker {shown(name)!r} is there; {', '.join(present) or 'none'} are.",
                param="ranks",
            )
