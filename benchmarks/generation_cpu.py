"""Prefill and decode speed of a folder, beside transformers on its dense original.

    python benchmarks/generation_cpu.py QUANTIZED DENSE

Both run in this process in float32 and take turns; the medians and their ratios are printed.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
import transformers

from terrazzo import LLM, SamplingParams
from terrazzo.engine.config import EngineConfig

PROMPT_TOKENS = 512
NEW_TOKENS = 64
ROUNDS = 5


def main() -> None:
    quantized, dense = sys.argv[1:]
    llm = LLM(quantized, EngineConfig(max_num_seqs=1, prefix_caching=False))
    model = transformers.AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32).eval()
    random = torch.Generator().manual_seed(0)
    prompt = torch.randint(0, model.config.vocab_size, (PROMPT_TOKENS,), generator=random).tolist()

    def ours(prompt_tokens: int, new_tokens: int) -> None:
        params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        llm.generate(prompt[:prompt_tokens], params)

    def theirs(prompt_tokens: int, new_tokens: int) -> None:
        ids = torch.tensor([prompt[:prompt_tokens]])
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            pad_token_id=0,
        )

    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {ROUNDS} rounds")
    compare("prefill", PROMPT_TOKENS, lambda run: run(PROMPT_TOKENS, 1), ours, theirs)
    compare("decode", NEW_TOKENS, lambda run: run(8, NEW_TOKENS), ours, theirs)


Run = Callable[[int, int], None]


def compare(label: str, tokens: int, task: Callable[[Run], None], ours: Run, theirs: Run) -> None:
    """Medians in tokens per second, after one round each that does not count."""
    seconds: dict[Run, list[float]] = {ours: [], theirs: []}
    for round_number in range(ROUNDS + 1):
        for run, times in seconds.items():
            start = time.perf_counter()
            task(run)
            if round_number:
                times.append(time.perf_counter() - start)
    mine, peer = (tokens / statistics.median(times) for times in seconds.values())
    print(
        f"{label}: terrazzo {mine:.1f} tokens/s, transformers {peer:.1f}, ratio {mine / peer:.2f}"
    )


if __name__ == "__main__":
    with torch.inference_mode():
        main()
