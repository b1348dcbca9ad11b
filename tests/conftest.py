"""Settings of the whole suite: properties are reproducible in CI and never judged by the clock."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None, database=None)
settings.register_profile("local", deadline=None)
settings.load_profile("ci" if "CI" in os.environ else "local")
