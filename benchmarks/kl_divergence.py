"""How far quantized checkpoints move a model: KL(reference || quantized) on held-out text.

At every position of every sequence the next-token distribution of the dense reference is compared
with that of each quantized folder, over the whole vocabulary, in nats. All models run
teacher-forced through `LLM(folder).logits`, so checkpoints of any GPTQ writer stand side by side.

    python benchmarks/kl_divergence.py dense-folder quantized-folder... --text held-out.txt

The standard error is taken over sequences, because positions of one sequence are not independent.
Folders share the same sequences, so the last table compares them pairwise with the first.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

import terrazzo
from terrazzo import LLM
from terrazzo.engine.tokenizer import Tokenizer
from terrazzo.errors import ConfigError

ROWS_AT_ONCE = 64
"""Positions compared at once: bounds the float32 temporaries to a few rows of the vocabulary."""


@dataclass(frozen=True, slots=True)
class SequenceScore:
    """One model on one sequence of L tokens.

    kl: mean KL(reference || model) over the L positions, nats per token.
    agreement: share of the L positions where both models rank the same token first.
    nll: mean negative log-likelihood of tokens 1..L-1 under the model, nats per token.
    """

    kl: float
    agreement: float
    nll: float


@dataclass(frozen=True, slots=True)
class Summary:
    """One model over all sequences. `kl_error` is the standard error of `kl` over sequences."""

    folder: str
    kl: float
    kl_error: float
    agreement: float
    perplexity: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """One folder against the first: mean of the paired difference in KL and its standard error."""

    folder: str
    against: str
    ratio: float
    difference: float
    difference_error: float


def score(reference_LV: Tensor, model_LV: Tensor, token_ids: Sequence[int]) -> SequenceScore:
    """Compare float32 logits [L, vocabulary] of both models on the same L tokens."""
    assert reference_LV.shape == model_LV.shape, "both models must share one vocabulary"
    kl = agreement = likelihood = 0.0
    targets = torch.tensor([*token_ids[1:], 0])
    length = len(token_ids)
    for start in range(0, length, ROWS_AT_ONCE):
        rows = slice(start, min(start + ROWS_AT_ONCE, length))
        reference, model = reference_LV[rows].log_softmax(-1), model_LV[rows].log_softmax(-1)
        kl += float((reference.exp() * (reference - model)).sum(dtype=torch.float64))
        agreement += int((reference.argmax(-1) == model.argmax(-1)).sum())
        chosen = model.gather(1, targets[rows].unsqueeze(1)).squeeze(1)
        scored = min(rows.stop, length - 1) - start
        likelihood += float(chosen[:scored].sum(dtype=torch.float64))
    return SequenceScore(kl / length, agreement / length, -likelihood / (length - 1))


def summarize(folder: str, scores: Sequence[SequenceScore]) -> Summary:
    mean, error = mean_and_error([s.kl for s in scores])
    agreement, _ = mean_and_error([s.agreement for s in scores])
    nll, _ = mean_and_error([s.nll for s in scores])
    return Summary(folder, mean, error, agreement, math.exp(nll))


def compare(
    first: str, first_scores: Sequence[SequenceScore], folder: str, scores: Sequence[SequenceScore]
) -> Comparison:
    differences = [s.kl - f.kl for f, s in zip(first_scores, scores, strict=True)]
    difference, error = mean_and_error(differences)
    base, _ = mean_and_error([f.kl for f in first_scores])
    return Comparison(folder, first, (base + difference) / base, difference, error)


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error; the error of a single value is not a number."""
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return mean, math.nan
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))


def sequences_of(
    folder: Path, text: Path, sequence_length: int, tokens: int
) -> list[tuple[int, ...]]:
    """The first `tokens // sequence_length` runs of the text, without overlap.

    Raises ConfigError when the text is shorter than that.
    """
    ids = Tokenizer(folder).encode(text.read_text(encoding="utf-8"))
    count = tokens // sequence_length
    if count < 1 or sequence_length < 2 or len(ids) < count * sequence_length:
        raise ConfigError(
            f"{text} holds {len(ids)} tokens and {tokens} were asked for in sequences of "
            f"{sequence_length}; legal are sequences of at least 2 tokens and no more tokens than "
            "the text holds; change --tokens or --sequence-length"
        )
    starts = range(0, count * sequence_length, sequence_length)
    return [tuple(ids[start : start + sequence_length]) for start in starts]


def measure(
    reference_folder: Path, folders: Sequence[Path], sequences: Sequence[tuple[int, ...]]
) -> dict[str, list[SequenceScore]]:
    """Scores of the reference and of each folder, one per sequence; all models are held at once."""
    reference = LLM(reference_folder)
    models = {str(reference_folder): reference} | {str(folder): LLM(folder) for folder in folders}
    scores: dict[str, list[SequenceScore]] = {name: [] for name in models}
    for number, token_ids in enumerate(sequences, start=1):
        reference_LV = reference.logits(token_ids)
        for name, model in models.items():
            model_LV = reference_LV if model is reference else model.logits(token_ids)
            scores[name].append(score(reference_LV, model_LV, token_ids))
        progress = "  ".join(f"{summarize(name, s).kl:.4f}" for name, s in scores.items())
        print(f"{number}/{len(sequences)}  {progress}", flush=True)
    return scores


def report(summaries: Sequence[Summary], comparisons: Sequence[Comparison]) -> str:
    lines = [f"{'KL nats/token':>22}  {'top-1':>7}  {'perplexity':>10}  folder"]
    lines += [
        f"{s.kl:12.5f} ± {s.kl_error:7.5f}  {s.agreement:7.4f}  {s.perplexity:10.3f}  {s.folder}"
        for s in summaries
    ]
    lines += [
        f"{c.folder} against {c.against}: KL ratio {c.ratio:.3f}, paired difference "
        f"{c.difference:+.5f} ± {c.difference_error:.5f} nats/token"
        for c in comparisons
    ]
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("reference", type=Path, help="folder of the dense model")
    parser.add_argument("quantized", type=Path, nargs="+", help="folders to compare with it")
    parser.add_argument("--text", type=Path, required=True, help="held-out text, UTF-8")
    parser.add_argument("--sequence-length", type=int, default=512, help="tokens per sequence")
    parser.add_argument("--tokens", type=int, default=16384, help="tokens in all")
    parser.add_argument("--json", type=Path, help="also write every number to this file")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    sequences = sequences_of(
        arguments.reference, arguments.text, arguments.sequence_length, arguments.tokens
    )
    scores = measure(arguments.reference, arguments.quantized, sequences)
    summaries = [summarize(name, values) for name, values in scores.items()]
    first, *others = (str(folder) for folder in arguments.quantized)
    comparisons = [compare(first, scores[first], name, scores[name]) for name in others]
    print(report(summaries, comparisons))
    if arguments.json is not None:
        record = {
            "date": datetime.date.today().isoformat(),
            "terrazzo": terrazzo.__version__,
            "torch": torch.__version__,
            "machine": platform.machine(),
            "text": arguments.text.name,
            "sequence_length": arguments.sequence_length,
            "sequences": len(sequences),
            "summaries": [asdict(summary) for summary in summaries],
            "comparisons": [asdict(comparison) for comparison in comparisons],
            "scores": {name: [asdict(s) for s in values] for name, values in scores.items()},
        }
        arguments.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
