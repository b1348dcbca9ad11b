"""These tests need the real GPTQModel; `scripts/interop.sh` makes its environment and runs them.

Without it nothing in this folder is collected, so a plain `pytest` stays quick and self-contained.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("gptqmodel") else ["test_*.py"]

# Read by GPTQModel when it is imported: its default of more workers than cores starves two cores.
os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
os.environ.setdefault("GPTQMODEL_DISABLE_GIL_WARNING", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
