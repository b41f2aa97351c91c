"""The sockets at which a mesh's gateways take connections, held by the launcher.

They outlive a gateway's process: what connects while it is started again waits, and two processes
may take connections of one socket while the one follows the other.
"""

from __future__ import annotations

import socket
from types import TracebackType

from compose.options import UsageError
from mesh.listener import bound_socket


class Listeners:
    """Gateway ``index`` listens on ``host``, port ``first_port + index``; 0 is any free one."""

    def __init__(self, host: str, first_port: int) -> None:
        self._host = host
        self.first_port = first_port
        self._sockets: dict[int, socket.socket] = {}

    def __enter__(self) -> Listeners:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for index in tuple(self._sockets):
            self.close(index)

    def open(self, index: int) -> int:
        """The descriptor of a socket that is bound; its gateway makes it listen. Raises
        ``UsageError`` when the port is taken.
        """
        if index not in self._sockets:
            port = self.first_port + index if self.first_port else 0
            try:
                self._sockets[index] = bound_socket(self._host, port)
            except OSError as error:
                raise UsageError(
                    f"gateway.port: cannot listen on {self._host}:{port} ({error.strerror}); "
                    "choose another with --port",
                    exit_code=1,
                ) from None
            if not port:
                self.first_port = self._sockets[index].getsockname()[1]
        return self._sockets[index].fileno()

    def close(self, index: int) -> None:
        """Let go of it, if it is open; it is closed when its gateway has done so too."""
        bound = self._sockets.pop(index, None)
        if bound is not None:
            bound.close()
