"""Two releases of moemesh beside each other, as an installation that is upgraded has them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "compose", "demo", "expert_svc", "gateway", "kernels/ep_kernels", "mesh", "moe_model",
    "planner_svc", "router_svc",
)  # fmt: skip


class Installation:
    """A directory on the module path that points to one release at a time.

    ``next`` is the code of this tree as its successor may be: it speaks one protocol more, and each
    of its messages has a field that nobody knows yet.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / "installed"
        self._directory = directory
        self._copy("this")
        messages = self._copy("next") / "mesh/messages.py"
        text = messages.read_text()
        options = "msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True"
        base = f"class _Message({options}):"
        field = 'since_next: str = msgspec.field(default_factory=lambda: "new")'
        for old, new in (
            ("\nPROTOCOL_MAX = 1\n", "\nPROTOCOL_MAX = 2\n"),
            (f"{base}\n    pass\n", f"{base}\n    {field}\n"),
        ):
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        messages.write_text(text)
        self.use("this")

    def use(self, release: str) -> None:
        """What starts from now on runs ``this`` or the ``next`` release."""
        new = self.path.with_name("installed.new")
        new.symlink_to(self._directory / release)
        new.replace(self.path)

    def environ(self) -> dict[str, str]:
        return os.environ | {"PYTHONPATH": str(self.path)}

    def _copy(self, release: str) -> Path:
        target = self._directory / release
        for package in PACKAGES:
            into = target / Path(package).name
            if package == "demo":
                into.symlink_to(ROOT / package)
            else:
                shutil.copytree(ROOT / package, into, ignore=shutil.ignore_patterns("__pycache__"))
        return target
