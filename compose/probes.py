"""Questions the launcher and ``moemesh status`` ask: of the planner, and of a gateway."""

from __future__ import annotations

import asyncio
import ssl
from types import TracebackType
from urllib.parse import urlsplit

from compose.options import UsageError
from compose.processes import ADMIN, Endpoint
from mesh.links import ClientLink, LinkError, Net
from mesh.messages import FromPlanner, GetStatus, Status, ToPlanner
from mesh.rundir import planner_address
from mesh.settings import Settings

_MAX_ANSWER_BYTES = 1024 * 1024


class PlannerProbe:
    """Asks the planner of a mesh for its ``Status``, over one connection that comes back with it.

    Enter it inside a running event loop; raises ``UsageError`` without the keys that it needs.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    async def __aenter__(self) -> PlannerProbe:
        self._net = Net(self._settings.security, ADMIN)
        try:
            self._link: ClientLink[FromPlanner, ToPlanner] = ClientLink(
                self._net, planner_address(self._settings), receives=FromPlanner
            )
        except LinkError as error:
            self._net.close()
            raise UsageError(str(error), exit_code=1) from None
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._link.close()
        self._net.close()

    async def status(self, timeout_s: float) -> Status | None:
        """The planner's answer, or None when it has not answered in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._link.wait_up()
                self._link.send(GetStatus())
                while True:
                    answer = await self._link.recv()
                    if isinstance(answer, Status):
                        return answer
        except (TimeoutError, LinkError):
            return None


async def gateway_readiness(endpoint: Endpoint, timeout_s: float) -> str | None:
    """None when the gateway says that a token can be run (``GET /ready``), else why not."""
    try:
        async with asyncio.timeout(timeout_s):
            status, body = await _get(endpoint, "/ready")
    except TimeoutError:
        return f"{endpoint.url} did not answer within {timeout_s:g} s"
    except OSError as error:
        return f"{endpoint.url} does not answer: {error}"
    return None if status == 200 else f"{endpoint.url}/ready says {status}: {body[:300]}"


async def fetch_metrics(url: str, timeout_s: float) -> str:
    """A member's Prometheus page. Raises ``OSError`` when it does not come in time."""
    parts = urlsplit(url)
    endpoint = Endpoint(parts.hostname or "", parts.port or 80, parts.scheme == "https")
    try:
        async with asyncio.timeout(timeout_s):
            status, body = await _get(endpoint, parts.path)
    except TimeoutError:
        raise OSError(f"no answer within {timeout_s:g} s") from None
    if status != 200:
        raise OSError(f"status {status}")
    return body


async def _get(endpoint: Endpoint, path: str) -> tuple[int, str]:
    """One HTTP/1.0 request. Raises ``OSError`` when no HTTP comes back."""
    reader, writer = await asyncio.open_connection(
        endpoint.host, endpoint.port, ssl=unverified() if endpoint.tls else None
    )
    try:
        request = f"GET {path} HTTP/1.0\r\nHost: {endpoint.host}\r\nUser-Agent: moemesh\r\n\r\n"
        writer.write(request.encode())
        answer = bytearray()
        while len(answer) < _MAX_ANSWER_BYTES and (chunk := await reader.read(4096)):
            answer += chunk
    finally:
        writer.close()
    head, _, body = bytes(answer).partition(b"\r\n\r\n")
    words = head.split(None, 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/") or not words[1].isdigit():
        raise ConnectionError("the answer is not HTTP")
    return int(words[1]), body.decode(errors="replace")


def unverified() -> ssl.SSLContext:
    """For a process on this host, asked at an address: its certificate names the host that clients
    know, and what is sent stays here.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
