"""What one start of a model takes: run as a process of its own, it prints the moments it passes.

    python -m terrazzo.bench.first_token FOLDER POLICY

Moments are of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import json
import sys
import time

from terrazzo.env import let_idle_threads_sleep, read_environment
from terrazzo.errors import TerrazzoError

PROMPT = "Once upon a time"


def main() -> int:
    entered = time.monotonic()
    let_idle_threads_sleep()
    import torch

    from terrazzo.engine.config import AUTO, EngineConfig
    from terrazzo.engine.llm import LLM
    from terrazzo.kernels.policy import KernelPolicy

    folder, policy = sys.argv[1:]
    threads = read_environment().threads
    if threads:
        torch.set_num_threads(threads)
    imported = time.monotonic()
    chosen = AUTO if policy == AUTO.value else KernelPolicy(policy)
    try:
        llm = LLM(folder, EngineConfig(max_num_seqs=1, kernel_policy=chosen))
        loaded = time.monotonic()
        next(llm.stream(PROMPT, llm.default_params(temperature=0.0, max_tokens=1)))
    except TerrazzoError as error:
        print(error, file=sys.stderr)
        return 2
    answered = time.monotonic()
    print(json.dumps([entered, imported, loaded, answered]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
