"""What is going to be quantized, decided and checked before anything is computed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from terrazzo.checkpoint.checkpoint import Checkpoint
from terrazzo.checkpoint.experts import Naming
from terrazzo.checkpoint.names import is_quantizable
from terrazzo.checkpoint.spelled_rules import respelled, spelling_remarks
from terrazzo.errors import ConfigError, RuleError, UnsupportedError
from terrazzo.idle_rules import idle_rules
from terrazzo.models.audit import HeadWeights
from terrazzo.models.config import ModelConfig
from terrazzo.models.loader import CheckpointSource, open_source
from terrazzo.models.parameters import ParameterKind, head_parameter, parameters
from terrazzo.packing import PLANAR_ONLY_BITS, is_planar
from terrazzo.rules import (
    BASE,
    OUT_OF_REACH,
    Plan,
    Resolution,
    Rule,
    RuleSet,
)
from terrazzo.spec import DENSE, WORD_BITS, Format, Name, QuantSpec

_PACK_DTYPE = "pack_dtype"
HEAD_RULE = {"bits": 8, "group_size": 32, "sym": True, "desc_act": False}
"""What GPTQModel gives a quantized head that no rule speaks of."""

DAMP_OPTION = "damp_percent"


@dataclass(frozen=True, slots=True)
class Job:
    """A dense model with the decision for each of its linears.

    rules: as they will be written, with the rule for the head where one was added. plan: every
    linear, the head last. shapes: of their weights, [out, in]. checkpoint_format: as it will be
    written. remarks: what the user should know before it starts.
    """

    source: CheckpointSource
    rules: RuleSet
    plan: Plan
    shapes: Mapping[Name, tuple[int, ...]]
    checkpoint_format: Format
    remarks: tuple[str, ...]

    @property
    def checkpoint(self) -> Checkpoint:
        return self.source.checkpoint

    @property
    def config(self) -> ModelConfig:
        return self.source.config

    @property
    def head(self) -> Name:
        return self.config.layout.head

    @property
    def unties_head(self) -> bool:
        """The head gets weights of its own, because the embedding it shared stays dense."""
        return self.head in self.plan.quantized and self.source.report.head is HeadWeights.EMBEDDING

    def damp_of(self, name: Name, default: float) -> float:
        """`damp_percent` of the rule that decided `name`, or `default`."""
        decider = self.plan[name].decided_by
        return _damp(decider, default) if isinstance(decider, Rule) else default


def open_job(model: str | Path, rules: RuleSet, checkpoint_format: Format = Format.GPTQ) -> Job:
    """Read the headers of `model`, resolve the rules once, check every spec against its shape.

    Raises ConfigError when the model is already quantized or when nothing would be quantized,
    RuleError for an illegal option, UnsupportedError for a shape that a format cannot hold, and
    what opening a checkpoint raises.
    """
    checkpoint = Checkpoint(model, Naming.TODAY)
    if checkpoint.plan.quantized:
        raise ConfigError(
            f"{checkpoint.folder}: {len(checkpoint.plan.quantized)} modules are already quantized; "
            "quantize the original model"
        )
    source = open_source(checkpoint)
    remarks: list[str] = []
    rules = respelled(rules, checkpoint.model_config, checkpoint.plan)
    rules = _with_head_rule(rules, source.config.layout.head, remarks)
    shapes = _shapes(source.config)
    names = tuple(shapes)
    plan = Plan(_decide(rules, name) for name in names)
    if not plan.quantized:
        raise ConfigError(f"{checkpoint.folder}: every linear stays dense; change the rules")
    reachable = [name for name in names if is_quantizable(name)]
    remarks += [str(idle) for idle in idle_rules(rules, reachable)]
    remarks += [*spelling_remarks(rules), *_option_remarks(rules)]
    remarks += [f"{x.name}: written as it is, {x.reason}" for x in source.report.ignored]
    checkpoint_format = _writable_format(rules, checkpoint_format, remarks)
    job = Job(source, rules, plan, shapes, checkpoint_format, ())
    _refuse_odd_planes(job)
    if job.unties_head:
        remarks.append(
            "the head shares its weights with the embedding: it gets its own, quantized; the "
            "embedding stays dense and config.json says tie_word_embeddings: false"
        )
    return replace(job, remarks=tuple(remarks))


def _decide(rules: RuleSet, name: Name) -> Resolution:
    """Routers are left alone, whatever the rules say, as GPTQ tools do."""
    if is_quantizable(name):
        return rules.resolve_name(name)
    return Resolution(name, DENSE, OUT_OF_REACH)


def _shapes(config: ModelConfig) -> dict[Name, tuple[int, ...]]:
    """Every linear in the order it runs; the head is one, tied or not."""
    linears = [p for p in parameters(config) if p.kind is ParameterKind.LINEAR]
    return {p.name: p.shape for p in (*linears, head_parameter(config))}


def _with_head_rule(rules: RuleSet, head: Name, remarks: list[str]) -> RuleSet:
    if not rules.lm_head or rules.resolve_name(head).decided_by is not BASE:
        return rules
    rule = Rule.parse(head, HEAD_RULE)
    remarks.append(
        f"no rule speaks of the head, so it gets {rule.apply(rules.base)}, as GPTQModel does; "
        f'a rule "{head}" decides otherwise'
    )
    return replace(rules, rules=(*rules.rules, rule))


def _option_remarks(rules: RuleSet) -> Iterator[str]:
    for rule in rules.rules:
        _damp(rule, 0.01)
        if _PACK_DTYPE in rule.options:
            raise RuleError(
                f"dynamic rule {rule.key!r}: {_PACK_DTYPE} is {rule.options[_PACK_DTYPE]!r}; "
                "Terrazzo writes words of int32 everywhere, and no engine reads a type out of a "
                "rule. Remove it"
            )
        unused = [option for option in rule.options if option != DAMP_OPTION]
        if unused:
            yield f"rule {rule.key!r}: {', '.join(unused)} kept in the config, not used"


def _damp(rule: Rule, default: float) -> float:
    value = rule.options.get(DAMP_OPTION, default)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1:
        return float(value)
    raise RuleError(
        f"dynamic rule {rule.key!r}: {DAMP_OPTION} is {value!r}; legal is a number between 0 and 1"
    )


def _writable_format(rules: RuleSet, wanted: Format, remarks: list[str]) -> Format:
    """The format that every reader of `wanted` can take.

    5, 6 and 7 bits exist in planes only, and a config that speaks of them is read as gptq_p. An
    asymmetric base is refused in v1 by GPTQModel unless GPTQModel itself wrote it.
    """
    specs = [rules.base, *(rule.apply(rules.base) for rule in rules.rules)]
    bits = {spec.bits for spec in specs if isinstance(spec, QuantSpec)}
    if wanted is Format.GPTQ_P:
        return wanted
    if not bits & PLANAR_ONLY_BITS:
        return _with_true_zeros(rules, wanted, remarks)
    spoken = ", ".join(str(each) for each in sorted(bits & PLANAR_ONLY_BITS))
    remarks.append(
        f"format {Format.GPTQ_P.value} instead of {wanted.value}: no other holds {spoken} bits"
    )
    return Format.GPTQ_P


def _with_true_zeros(rules: RuleSet, wanted: Format, remarks: list[str]) -> Format:
    if rules.base.sym or wanted is not Format.GPTQ:
        return wanted
    remarks.append(
        f"format {Format.GPTQ_V2.value} instead of {wanted.value}: the base is asymmetric, and "
        "GPTQModel reads its zero points in v1 from nobody else"
    )
    return Format.GPTQ_V2


def _refuse_odd_planes(job: Job) -> None:
    """A bit plane holds 32 codes along either side."""
    for name, spec in job.plan.quantized.items():
        odd = [size for size in job.shapes[name] if size % WORD_BITS]
        if odd and is_planar(spec.bits, job.checkpoint_format):
            raise UnsupportedError(
                f"{name}: {spec.bits} bits in format {job.checkpoint_format.value} need inputs and "
                f"outputs in multiples of {WORD_BITS}, not {odd[0]}; choose 2, 4 or 8 bits for it"
            )
