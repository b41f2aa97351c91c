"""When to start a child again that died by itself. Pure: time is an argument."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

from mesh.supervise import ExitCode

HOPELESS = frozenset({ExitCode.CANNOT_SERVE, ExitCode.ALREADY_RUNNING})
"""Exit codes that say: the next start ends the same way, unless somebody changes something."""

_MOST_DOUBLINGS = 32


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Back-off doubles from ``first_delay_s`` to ``max_delay_s`` with each death inside
    ``window_s``. A mesh that never was ready gives a child up after ``max_deaths`` of them: it is
    set up wrongly, and whoever starts it is watching. One that has served goes on trying for ever.
    """

    max_deaths: int = 5
    window_s: float = 120.0
    first_delay_s: float = 0.5
    max_delay_s: float = 10.0


@dataclass(slots=True)
class RestartBudget:
    """The deaths of one child."""

    policy: RestartPolicy = field(default_factory=RestartPolicy)
    deaths: list[float] = field(default_factory=list)

    def died(self, exit_code: int, now_s: float, *, served: bool) -> float | None:
        """Notes a death; returns the seconds to wait before the next start, None to give up.

        ``served``: the mesh has been ready once.
        """
        policy = self.policy
        recent = [at for at in self.deaths if now_s - at < policy.window_s]
        self.deaths = [*recent[-_MOST_DOUBLINGS:], now_s]
        hopeless = exit_code in HOPELESS
        if not served and (hopeless or len(self.deaths) >= policy.max_deaths):
            return None
        if hopeless:
            return policy.max_delay_s
        doublings = len(self.deaths) - 1
        return min(policy.first_delay_s * 2.0**doublings, policy.max_delay_s)


def exit_words(exit_code: int) -> str:
    """How a child ended, for people: ``was killed by SIGKILL`` or ``exited with code 1``."""
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    try:
        return f"was killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was killed by signal {-exit_code}"
