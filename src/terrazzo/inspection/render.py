"""An inspection as text for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from terrazzo.inspection.inspection import Inspection, ModuleLine, Serving
from terrazzo.spec import PER_CHANNEL, QuantSpec

_HEADINGS = (
    "module",
    "bits",
    "group",
    "sym",
    "act-order",
    "shape",
    "bytes",
    "decided by",
    "kernel",
)
_MIB = 1 << 20


def to_text(inspection: Inspection) -> str:
    """A table of modules, totals, the memory plan, and everything that needs attention."""
    return "\n".join(
        [
            *_table([_HEADINGS, *(_row(module) for module in inspection.modules)]),
            "",
            *_totals(inspection),
            *_attention(inspection),
            *_outcome(inspection),
        ]
    )


def to_json(inspection: Inspection) -> dict[str, Any]:
    """The same facts, bytes and shapes as numbers."""
    outcome = inspection.outcome
    return {
        "folder": str(inspection.folder),
        "servable": inspection.is_servable,
        "reason": "" if isinstance(outcome, Serving) else outcome.reason,
        "architecture": outcome.architecture if isinstance(outcome, Serving) else "",
        "total_bytes": inspection.total_bytes,
        "bits_per_weight": inspection.bits_per_weight,
        "memory": _memory(outcome) if isinstance(outcome, Serving) else {},
        "notes": list(outcome.notes) if isinstance(outcome, Serving) else [],
        "conflicts": list(inspection.conflicts),
        "remarks": list(inspection.remarks),
        "modules": [_module(module) for module in inspection.modules],
    }


def _row(module: ModuleLine) -> tuple[str, ...]:
    shape = f"{module.shape[0]} x {module.shape[1]}"
    size = f"{module.num_bytes:,}"
    if not isinstance(module.spec, QuantSpec):
        return (module.name, "dense", "", "", "", shape, size, module.decided_by, module.kernel)
    spec = module.spec
    return (
        module.name,
        str(spec.bits),
        "channel" if spec.group_size == PER_CHANNEL else str(spec.group_size),
        "yes" if spec.sym else "no",
        "yes" if spec.desc_act else "no",
        shape,
        size,
        module.decided_by,
        module.kernel,
    )


def _table(rows: list[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        yield "  ".join(cells).rstrip()


def _totals(inspection: Inspection) -> Iterator[str]:
    quantized = [m for m in inspection.modules if isinstance(m.spec, QuantSpec)]
    yield (
        f"{len(quantized)} of {len(inspection.modules)} linears are quantized; "
        f"{inspection.total_bytes / _MIB:.1f} MiB on disk, of which the linears take "
        f"{inspection.bits_per_weight:.3f} bits per weight"
    )


def _attention(inspection: Inspection) -> Iterator[str]:
    for title, lines in (("conflicts", inspection.conflicts), ("remarks", inspection.remarks)):
        if lines:
            yield f"{title} ({len(lines)})"
            yield from (f"  {line}" for line in lines)


def _outcome(inspection: Inspection) -> Iterator[str]:
    outcome = inspection.outcome
    if not isinstance(outcome, Serving):
        yield f"unservable: {outcome.reason}"
        return
    yield from outcome.notes
    yield f"memory: {outcome.memory}"
    yield f"servable as {outcome.architecture}"


def _memory(outcome: Serving) -> dict[str, int]:
    plan = outcome.memory
    return {
        "weight_bytes": plan.needs.weight_bytes,
        "kv_bytes": plan.kv_bytes,
        "kv_tokens": plan.limits.capacity,
        "max_model_len": plan.limits.max_model_len,
        "available_bytes": plan.available_bytes,
    }


def _module(module: ModuleLine) -> dict[str, Any]:
    spec = module.spec
    fields = (
        {
            "quantized": True,
            "bits": spec.bits,
            "group_size": spec.group_size,
            "sym": spec.sym,
            "desc_act": spec.desc_act,
        }
        if isinstance(spec, QuantSpec)
        else {"quantized": False}
    )
    return {
        "name": module.name,
        **fields,
        "out_features": module.shape[0],
        "in_features": module.shape[1],
        "bytes": module.num_bytes,
        "decided_by": module.decided_by,
        "kernel": module.kernel,
        "verdicts": {verdict.kernel: verdict.reason for verdict in module.verdicts},
    }
