from __future__ import annotations

import pytest

from mesh.messages import RECORD_WAIT_S, Recorded
from planner_svc.recordings import MAX_PENDING, RESEND_S, Recordings, RecordingsBusy


def said(router: str, command: int, steps: int = 3) -> Recorded:
    return Recorded(id=router, incarnation=1, command=command, recording=True, steps=steps)


def test_the_answer_comes_when_every_router_has_answered() -> None:
    recordings = Recordings(100)
    recordings.ask(b"p", "start", ["r0", "r1"], 0.0)
    commands, answers = recordings.due(0.0)
    assert [router for router, _ in commands] == ["r0", "r1"]
    assert not answers
    (told,) = {told.command: told for _, told in commands}.values()
    assert told.action == "start"
    recordings.answered(said("r0", told.command))
    recordings.answered(said("r0", told.command))
    assert recordings.due(RESEND_S / 2) == ([], [])
    assert recordings.due(RESEND_S) == ([("r1", told)], [])
    recordings.answered(said("r1", told.command, steps=9))
    commands, ((peer, detail),) = recordings.due(RESEND_S)
    assert (commands, peer) == ([], b"p")
    assert [(at.router, at.recording, at.steps) for at in detail.routers] == [
        ("r0", True, 3),
        ("r1", True, 9),
    ]
    assert recordings.due(99.0) == ([], [])


def test_a_router_that_is_silent_or_gone_is_named() -> None:
    recordings = Recordings(100)
    recordings.ask(b"p", "dump", ["r0", "r1"], 0.0)
    recordings.answered(said("r0", 7))  # to an older command
    recordings.answered(said("stranger", 101))
    recordings.gone("r1")
    assert recordings.due(RECORD_WAIT_S - 0.1)[1] == []
    ((_, detail),) = recordings.due(RECORD_WAIT_S)[1]
    assert [(at.router, at.recording, at.error) for at in detail.routers] == [
        ("r0", False, "no answer within 5 s"),
        ("r1", False, "it has gone"),
    ]


def test_nobody_to_record_and_too_many_requests_are_refused() -> None:
    recordings = Recordings(100)
    with pytest.raises(RecordingsBusy, match="no router"):
        recordings.ask(b"p", "start", [], 0.0)
    for _ in range(MAX_PENDING):
        recordings.ask(b"p", "stop", ["r0"], 0.0)
    with pytest.raises(RecordingsBusy, match="16 requests"):
        recordings.ask(b"p", "stop", ["r0"], 0.0)
    recordings.due(RECORD_WAIT_S)
    recordings.ask(b"p", "stop", ["r0"], RECORD_WAIT_S)
