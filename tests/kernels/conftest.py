from __future__ import annotations

import sys
from pathlib import Path

# The tests share the program that they start as a process of its own.
sys.path.insert(0, str(Path(__file__).parent))
