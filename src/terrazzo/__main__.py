"""`python -m terrazzo` is the `terrazzo` command."""

from __future__ import annotations

from terrazzo.cli import main

main()
