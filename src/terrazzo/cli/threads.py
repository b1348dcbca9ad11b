"""How many CPU threads a command computes with."""

from __future__ import annotations

import torch

from terrazzo.env import read_environment


def use_threads() -> None:
    """Obeys TERRAZZO_THREADS. Raises ConfigError when it is no number."""
    threads = read_environment().threads
    if threads:
        torch.set_num_threads(threads)
