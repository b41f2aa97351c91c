"""``python -m router_svc``: one router."""

from __future__ import annotations

import gc
import signal

if __name__ == "__main__":
    # While modules are imported there is nothing to clean up: a Ctrl-C ends that at once.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.disable()  # nor for the collector, which would look at all of them again and again
    from mesh.service import run_service
    from router_svc.service import main

    run_service("router", main)
