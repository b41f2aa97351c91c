"""Coverage-guided fuzzing: ``make fuzz DECODER=bundle SECONDS=60``.

    python -m tests.fuzz.atheris_run DECODER [libFuzzer's flags]

An empty name stands for all of them, one after another. What breaks one ends the run and lies in a
file ``crash-...``; give libFuzzer that file to run it again. Needs the extra ``fuzz``.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(
    include=["gateway", "mesh", "moe_model", "planner_svc", "ep_kernels"]
):
    from tests.fuzz.decoders import DECODERS


def main() -> None:
    name, *flags = sys.argv[1:] or [""]
    if not name:
        for each in DECODERS:
            print(f"== {each}", flush=True)
            again = [sys.executable, "-m", "tests.fuzz.atheris_run", each, *flags]
            subprocess.run(again, check=True)
        return
    if name not in DECODERS:
        sys.exit(f"no decoder {name!r}; expected one of {', '.join(DECODERS)}")
    decoder = DECODERS[name]
    with tempfile.TemporaryDirectory(prefix="moemesh-corpus-") as corpus:
        for number, seed in enumerate(decoder.seeds):
            Path(corpus, str(number)).write_bytes(seed)
        atheris.Setup([sys.argv[0], *flags, corpus], decoder)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
