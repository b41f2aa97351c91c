from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
import uvloop

from mesh.links import Net

DEADLINE_S = 20.0


@pytest.fixture
def run() -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """Run a coroutine to its end on uvloop, with a deadline against hanging."""

    def runner(main: Coroutine[Any, Any, Any]) -> Any:
        async def bounded() -> Any:
            async with asyncio.timeout(DEADLINE_S):
                return await main

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
            return loop.run(bounded())

    return runner


@pytest.fixture
def net() -> Iterator[Net]:
    """Closed whatever happens: a ZeroMQ context with open sockets would hang at exit."""
    net = Net()
    yield net
    net.close()


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/a.sock"


@pytest.fixture(autouse=True)
def _fresh_logging() -> Iterator[None]:
    before = structlog.get_config()
    yield
    structlog.configure(**before)
