"""One engine with one model, kept alive: requests come as lines of JSON, answers go back likewise.

    python benchmarks/cpu_peer_worker.py llama.cpp model.gguf "" '{"threads": 2, ...}'

The first line out tells what was loaded; then every request for a batch is answered with seconds.
`cpu_peers.py` starts these, each with the interpreter in which its engine is installed. Nothing but
answers goes to the stdout it was given: engines print to stderr, wherever they meant to.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Protocol, TextIO

Tokens = Sequence[int]
UBATCH = 512
"""Prompt tokens that llama.cpp computes at once; its default."""


@dataclass(frozen=True)
class Room:
    """What the largest request of a run needs."""

    threads: int
    batch: int
    prompt: int
    new: int


@dataclass(frozen=True)
class Seconds:
    """prefill: from the prompts to the first token of each. decode: of `new` more for each."""

    prefill: float
    decode: float


class Engine(Protocol):
    vocabulary: int
    facts: dict[str, Any]

    def run(self, prompts: Sequence[Tokens], new: int) -> Seconds: ...


class Terrazzo:
    """option: the kernel policy."""

    def __init__(self, folder: str, option: str, room: Room) -> None:
        from terrazzo.env import let_idle_threads_sleep

        let_idle_threads_sleep()
        import torch

        from terrazzo import LLM, Checkpoint
        from terrazzo.bench.hardware import MemoryReader, this_machine
        from terrazzo.bench.offline import Workload
        from terrazzo.bench.traffic import WeightTraffic
        from terrazzo.kernels.policy import KernelPolicy

        torch.set_num_threads(room.threads)
        checkpoint, policy = Checkpoint(folder), KernelPolicy(option or "speed")
        largest = Workload((room.batch,), room.prompt, room.new)
        self._llm = LLM(folder, largest.engine_config(checkpoint, policy))
        machine = this_machine()
        self._memory = MemoryReader(machine.cache_bytes)
        self.vocabulary = self._llm.model_config.vocab_size
        traffic = WeightTraffic.of(checkpoint, self._llm.model_config, policy)
        self.facts = {
            "version": machine.terrazzo,
            "torch": machine.torch,
            "threads": machine.threads,
            "kernels": dict(traffic.kernels),
            "weight_bytes": traffic.step_bytes(1),
        }

    def run(self, prompts: Sequence[Tokens], new: int) -> Seconds:
        from terrazzo.bench.offline import run_once

        taken = run_once(self._llm.engine, prompts, new, time.perf_counter)
        return Seconds(taken.prefill, taken.decode)

    def memory_gb_per_s(self) -> float:
        return self._memory.gb_per_s()


class LlamaCpp:
    """Through its C functions: prompts in pieces, then one token of every sequence at each call."""

    def __init__(self, file: str, option: str, room: Room) -> None:
        import llama_cpp

        self._api = llama_cpp
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_default_params()
        model.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(file.encode(), model)
        if not self._model:
            raise RuntimeError("llama.cpp does not load the file")
        context = llama_cpp.llama_context_default_params()
        context.n_ctx = room.batch * (-(-(room.prompt + room.new + 1) // 256) * 256)
        context.n_seq_max = room.batch
        context.n_batch = max(UBATCH, room.batch)
        context.n_ubatch = UBATCH
        context.n_threads = context.n_threads_batch = room.threads
        self._context = llama_cpp.llama_init_from_model(self._model, context)
        if not self._context:
            raise RuntimeError("llama.cpp makes no context of this size")
        self._batch = llama_cpp.llama_batch_init(context.n_batch, 0, 1)
        self._room = int(context.n_batch)
        vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self.facts = {
            "version": version("llama-cpp-python"),
            "threads": llama_cpp.llama_n_threads(self._context),
            "system": llama_cpp.llama_print_system_info().decode().strip(),
            "weight_bytes": llama_cpp.llama_model_size(self._model),
        }

    def run(self, prompts: Sequence[Tokens], new: int) -> Seconds:
        memory = self._api.llama_get_memory(self._context)
        self._api.llama_memory_clear(memory, False)
        start = time.perf_counter()
        tokens = [self._prefill(number, prompt) for number, prompt in enumerate(prompts)]
        prefilled = time.perf_counter()
        for position in range(len(prompts[0]), len(prompts[0]) + new):
            rows = [(token, position, number, True) for number, token in enumerate(tokens)]
            self._decode(rows)
            tokens = [self._best(row) for row in range(len(rows))]
        return Seconds(prefilled - start, time.perf_counter() - prefilled)

    def _prefill(self, sequence: int, prompt: Tokens) -> int:
        last = len(prompt) - 1
        rows = [(token, place, sequence, place == last) for place, token in enumerate(prompt)]
        for first in range(0, len(rows), self._room):
            self._decode(rows[first : first + self._room])
        return self._best(-1)

    def _decode(self, rows: Sequence[tuple[int, int, int, bool]]) -> None:
        """rows: token, position, sequence, whether its logits are wanted."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for row, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[row] = token
            batch.pos[row] = position
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = sequence
            batch.logits[row] = wanted
        status = self._api.llama_decode(self._context, batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")

    def _best(self, row: int) -> int:
        import numpy

        logits = self._api.llama_get_logits_ith(self._context, row)
        return int(numpy.ctypeslib.as_array(logits, shape=(self.vocabulary,)).argmax())


class Torch:
    """Any module with the forward call of transformers: no `generate`, whose loop costs time."""

    def __init__(self, model: Any) -> None:
        import torch
        import transformers

        self._model = model
        self.vocabulary = int(model.config.vocab_size)
        self.facts: dict[str, Any] = {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "dtype": str(model.dtype),
        }

    def run(self, prompts: Sequence[Tokens], new: int) -> Seconds:
        import torch

        with torch.inference_mode():
            start = time.perf_counter()
            out = self._model(torch.tensor(prompts), use_cache=True, logits_to_keep=1)
            tokens = out.logits[:, -1:].argmax(-1)
            prefilled = time.perf_counter()
            for _ in range(new):
                out = self._model(tokens, past_key_values=out.past_key_values, use_cache=True)
                tokens = out.logits[:, -1:].argmax(-1)
            tokens.tolist()
            return Seconds(prefilled - start, time.perf_counter() - prefilled)


def open_transformers(folder: str, option: str, room: Room) -> Engine:
    """option: a dtype, float32 without one."""
    import torch
    import transformers

    torch.set_num_threads(room.threads)
    dtype = getattr(torch, option or "float32")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return Torch(model.eval())


def open_gptqmodel(folder: str, option: str, room: Room) -> Engine:
    """option: the backend, `auto` without one."""
    import torch
    from gptqmodel import BACKEND, GPTQModel

    torch.set_num_threads(room.threads)
    loaded = GPTQModel.load(folder, device="cpu", backend=BACKEND(option or "auto"))
    engine = Torch(loaded.model.eval())
    kinds = {type(each).__name__ for each in loaded.model.modules()}
    kernels = sorted(kind for kind in kinds if "Linear" in kind)
    engine.facts |= {"version": version("gptqmodel"), "kernels": kernels}
    return engine


ENGINES: dict[str, Callable[[str, str, Room], Engine]] = {
    "terrazzo": Terrazzo,
    "llama.cpp": LlamaCpp,
    "transformers": open_transformers,
    "gptqmodel": open_gptqmodel,
}


def answer(engine: Engine, request: dict[str, Any]) -> dict[str, Any]:
    """`batch`, `prompt`, `new`, `seed` -> seconds; `memory` -> GB/s, if the engine can tell."""
    if request.get("memory"):
        assert isinstance(engine, Terrazzo)
        return {"memory_gb_per_s": engine.memory_gb_per_s()}
    draw = random.Random(request["seed"])
    prompts = [
        [draw.randrange(engine.vocabulary) for _ in range(request["prompt"])]
        for _ in range(request["batch"])
    ]
    taken = engine.run(prompts, request["new"])
    return {"prefill_s": taken.prefill, "decode_s": taken.decode}


def private_stdout() -> TextIO:
    """The stdout of this process, which from now on prints to stderr."""
    ours = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    return ours


def main() -> None:
    kind, path, option, room = sys.argv[1:]
    out = private_stdout()
    start = time.perf_counter()
    engine = ENGINES[kind](path, option, Room(**json.loads(room)))
    facts = {**engine.facts, "load_s": time.perf_counter() - start, "vocabulary": engine.vocabulary}
    print(json.dumps(facts), file=out)
    for line in sys.stdin:
        print(json.dumps(answer(engine, json.loads(line))), file=out)


if __name__ == "__main__":
    main()
