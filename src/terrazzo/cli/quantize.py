"""`terrazzo quantize`: a Hugging Face model becomes a GPTQ checkpoint, by rules."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from terrazzo.quantization.options import (
    BUILTIN,
    DEFAULT_CALIBRATION,
    DEFAULT_GPTQ,
    CalibrationOptions,
    GptqOptions,
)
from terrazzo.quantization.rules_file import read_rules
from terrazzo.rules import RuleSet
from terrazzo.spec import Format

if TYPE_CHECKING:
    from terrazzo.quantization.job import Job
    from terrazzo.quantization.report import QuantizationReport


class FromRules(enum.Enum):
    """The option was not given: the rules say it, or GPTQModel's default holds."""

    FROM_RULES = "from-rules"


class Head(enum.Enum):
    DENSE = "dense"
    QUANTIZE = "quantize"
    FROM_RULES = "from-rules"


def quantize_command(
    model: Path,
    out: Path,
    /,
    *,
    rules: str = "{}",
    bits: int | FromRules = FromRules.FROM_RULES,
    group_size: int | FromRules = FromRules.FROM_RULES,
    sym: bool | FromRules = FromRules.FROM_RULES,
    desc_act: bool | FromRules = FromRules.FROM_RULES,
    lm_head: Head = Head.FROM_RULES,
    format: Literal["gptq", "gptq_v2", "gptq_p"] = "gptq",
    calibration: str = str(BUILTIN),
    calibration_tokens: int = DEFAULT_CALIBRATION.num_tokens,
    sequence_length: int = DEFAULT_CALIBRATION.sequence_length,
    seed: int = DEFAULT_CALIBRATION.seed,
    damp: float = DEFAULT_GPTQ.damp,
    dry_run: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Quantize a Hugging Face model by rules, layer by layer.

    Parameters
    ----------
    model
        The model: a folder with config.json, safetensors and tokenizer.json.
    out
        The folder to write; it appears when it is whole.
    rules
        JSON, or a file of it: a config with bits, group_size, sym, desc_act, lm_head and dynamic,
        or the rules of dynamic alone.
    bits
        Bits per weight where no rule says otherwise: 2 to 8.
    group_size
        Inputs per scale where no rule says otherwise; -1 is one scale per output.
    sym
        Whether the zero point is the middle code where no rule says otherwise.
    desc_act
        Form groups in the order of activations, which readers need g_idx for.
    lm_head
        Whether the output head is quantized.
    format
        How codes and zero points are stored; gptq is what most engines read.
    calibration
        "builtin", a .txt file, or a .jsonl file with "text" or "messages".
    calibration_tokens
        How much of it; more costs time in proportion.
    sequence_length
        Tokens per calibration sequence.
    seed
        Chooses the sequences.
    damp
        Part of the mean of the Hessian's diagonal that is added to it.
    dry_run
        Print the plan and stop.
    """
    from terrazzo.cli.quantize_progress import shown
    from terrazzo.cli.threads import use_threads
    from terrazzo.quantization.job import open_job
    from terrazzo.quantization.pipeline import run_job

    use_threads()
    rule_set = with_options(read_rules(rules), bits, group_size, sym, desc_act, lm_head)
    options = GptqOptions(damp=damp)
    source = BUILTIN if calibration == str(BUILTIN) else Path(calibration)
    text = CalibrationOptions(source, calibration_tokens, sequence_length, seed)
    job = open_job(model, rule_set, Format(format))
    print("\n".join(plan_lines(job)), flush=True)
    if dry_run:
        return
    with shown() as progress:
        report = run_job(job, out, calibration=text, options=options, progress=progress)
    print("\n".join(report_lines(job, report)), flush=True)


def with_options(
    rules: RuleSet,
    bits: int | FromRules,
    group_size: int | FromRules,
    sym: bool | FromRules,
    desc_act: bool | FromRules,
    lm_head: Head,
) -> RuleSet:
    """The options that were given, laid over the base of the rules."""
    options = {"bits": bits, "group_size": group_size, "sym": sym, "desc_act": desc_act}
    given: dict[str, Any] = {
        name: value for name, value in options.items() if not isinstance(value, FromRules)
    }
    quantizes_head = rules.lm_head if lm_head is Head.FROM_RULES else lm_head is Head.QUANTIZE
    base = replace(rules.base, **given)
    return RuleSet.parse(rules.to_dynamic(), base, lm_head=quantizes_head)


def plan_lines(job: Job) -> Iterator[str]:
    """Who decided how many modules to be what, and what to know beforehand."""
    config = job.config
    yield (
        f"{job.checkpoint.folder}: {config.architecture.name}, {config.num_layers} layers, "
        f"{len(job.plan)} linears; writing format {job.checkpoint_format.value}"
    )
    decisions = Counter((str(r.spec), str(r.decided_by)) for r in job.plan.values())
    width = max(len(spec) for spec, _ in decisions)
    for (spec, decider), count in decisions.items():
        yield f"  {count:5} x {spec:<{width}}  {decider}"
    for remark in job.remarks:
        yield f"note: {remark}"


def report_lines(job: Job, report: QuantizationReport) -> Iterator[str]:
    """Losses by kind of module, failed dampings, sizes, and what to do next."""
    kinds = report.kinds()
    width = max(len(kind.kind) for kind in kinds)
    yield f"{'output error':<{width}}   median  rounding     worst"
    for kind in kinds:
        yield (
            f"{kind.kind:<{width}} {kind.median_loss:8.3%} {kind.median_rtn_loss:9.3%} "
            f"{kind.worst.loss:9.3%}  {kind.worst.name}, {', '.join(map(str, kind.specs))}"
        )
    for module in report.modules:
        for line in module.log:
            yield f"note: {module.name}: {line}"
    before, after = weight_bytes(job.checkpoint.folder), weight_bytes(report.folder)
    yield (
        f"{report.folder}: {after / 1e6:.1f} MB, before {before / 1e6:.1f} MB; "
        f"{report.calibration_tokens} calibration tokens, {report.seconds:.0f} s"
    )
    yield f"next: terrazzo inspect {report.folder}"


def weight_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
