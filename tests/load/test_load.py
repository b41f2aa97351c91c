"""Some locust on a fresh mesh: nothing fails, and all is in its statistics."""

from __future__ import annotations

from pathlib import Path

from tests.load.run import figure, fresh_mesh, run

USERS = 4
SECONDS = 20


def test_mixed_load_with_several_keys_fails_no_request(tmp_path: Path) -> None:
    with fresh_mesh() as mesh:
        result = run(mesh, tmp_path, seconds=SECONDS, users=USERS, rate=1.0)
        assert result.ok, result.output
        assert result.count("E2E") == result.count("TTFT") > 3
        assert result.count("SLO met") + result.count("SLO missed") == result.count("E2E")
        assert result.count("ITL") > result.count("E2E")
        names = {row["Name"] for row in result.rows if row["Type"] == "E2E"}
        assert any(name.startswith("open ") for name in names)
        assert any(name.startswith("completion ") for name in names)
        # Clients that hang up free what they had; whether one did so late is chance. So do those
        # that were under way when the time was up: a user of each loop has one.
        hung_up = figure(mesh, "request_disconnects_total")
        assert hung_up <= result.count("CANCELLED") + 2 * USERS
        for name in ("load-a", "load-b", "load-c"):
            assert f'"tenant":"{name}"' in mesh.run("logs", "--json", "gateway-0")
    assert (tmp_path / "load.html").stat().st_size > 1000
    assert (tmp_path / "load_stats_history.csv").exists()
