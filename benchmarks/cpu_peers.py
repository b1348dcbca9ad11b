"""Terrazzo beside llama.cpp, transformers and GPTQModel in one run, round after round.

    python benchmarks/cpu_peers.py --threads 2 --rounds 5 --json peers.json \\
        --python llama.cpp=.venv-peers/bin/python --python gptqmodel=.venv-interop/bin/python \\
        --peer terrazzo:smollm2-w4g128@speed --peer llama.cpp:smollm2-Q4_0.gguf \\
        --peer transformers:smollm2 --peer gptqmodel:smollm2-w4g128@torch

A peer is `kind:path@option`: the option is a kernel policy of Terrazzo, a dtype of transformers or
a backend of GPTQModel. Each lives in a process of its own for the whole run and has the machine to
itself while it is asked; peers take turns in every round, so that a busy moment of the machine hits
all of them. A ratio is the median over rounds of what both did in the same round. A case is
`BATCHxPROMPT+NEW`: sequences at once, random tokens of each prompt, tokens decoded after it.

Threads that wait for each other lose many times the time that somebody else takes from one of them,
and engines differ in that. So what others used of the cores is measured too, other guests of the
host included: above `--quiet` of them, a measurement is taken again, up to `--attempts` times, and
the least disturbed counts. What remained is printed.

Peers that cannot be measured are named with the reason. Files for llama.cpp must come from the same
model; `synthetic_gptq.py` makes checkpoints of any shape.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

WORKER = Path(__file__).with_name("cpu_peer_worker.py")
OURS = "terrazzo"
WARM_UP_NEW = 4
KINDS = (OURS, "llama.cpp", "transformers", "gptqmodel")


@dataclass(frozen=True)
class Case:
    """batch: sequences at once. prompt, new: tokens of each."""

    batch: int
    prompt: int
    new: int

    @classmethod
    def parse(cls, text: str) -> Case:
        batch, _, rest = text.partition("x")
        prompt, _, new = rest.partition("+")
        return cls(int(batch), int(prompt), int(new))

    def __str__(self) -> str:
        return f"{self.batch}x{self.prompt}+{self.new}"


@dataclass(frozen=True)
class Spec:
    """Which engine, which model, and how."""

    kind: str
    path: str
    option: str

    @classmethod
    def parse(cls, text: str) -> Spec:
        kind, _, rest = text.partition(":")
        path, _, option = rest.partition("@")
        if kind not in KINDS or not path:
            raise argparse.ArgumentTypeError(f"{text!r}; legal is KIND:PATH[@OPTION], {KINDS}")
        return cls(kind, path, option)

    @property
    def label(self) -> str:
        name = Path(self.path).name
        return f"{self.kind} {name}@{self.option}" if self.option else f"{self.kind} {name}"


class Gone(Exception):
    """A worker does not answer; the message says what is known."""


@dataclass(frozen=True)
class Attempt:
    """rates: tokens per second by phase. others: the share of the cores that others used."""

    rates: dict[str, float]
    others: float


@dataclass
class Peer:
    """A worker, and what it measured, one value for each round. rates: tokens per second. others:
    the share of the cores that others used meanwhile.
    """

    spec: Spec
    process: subprocess.Popen[str]
    errors: Path
    facts: dict[str, Any] = field(default_factory=dict)
    rates: dict[tuple[Case, str], list[float]] = field(default_factory=dict)
    others: dict[Case, list[float]] = field(default_factory=dict)

    def ask(self, request: Mapping[str, Any], patience: float) -> dict[str, Any]:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self.listen(patience)

    def listen(self, patience: float) -> dict[str, Any]:
        """The next line of the worker. patience: seconds. Raises Gone."""
        assert self.process.stdout
        ready, _, _ = select.select([self.process.stdout], [], [], patience)
        if not ready:
            raise Gone(f"no answer within {patience:.0f} s")
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            raise Gone(self.last_words())
        answer: dict[str, Any] = json.loads(line)
        return answer

    def last_words(self) -> str:
        text = self.errors.read_text(encoding="utf-8", errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return lines[-1] if lines else f"ended with status {self.process.returncode}"

    def measure(self, case: Case, seed: int, arguments: argparse.Namespace) -> None:
        attempt = self._attempt(case, seed, arguments.patience)
        for _ in range(arguments.attempts - 1):
            if attempt.others > arguments.quiet:
                again = self._attempt(case, seed, arguments.patience)
                attempt = min(attempt, again, key=lambda each: each.others)
        self.others.setdefault(case, []).append(attempt.others)
        for phase, rate in attempt.rates.items():
            self.rates.setdefault((case, phase), []).append(rate)

    def _attempt(self, case: Case, seed: int, patience: float) -> Attempt:
        request = {"batch": case.batch, "prompt": case.prompt, "new": case.new, "seed": seed}
        start, busy, own = time.monotonic(), busy_s(), process_s(self.process.pid)
        taken = self.ask(request, patience)
        rates = {
            "prefill": case.batch * case.prompt / taken["prefill_s"],
            "decode": case.batch * case.new / taken["decode_s"],
        }
        foreign = (busy_s() - busy) - (process_s(self.process.pid) - own)
        capacity = (os.cpu_count() or 1) * (time.monotonic() - start)
        return Attempt(rates, max(0.0, foreign / capacity))

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@dataclass
class Run:
    """All peers of a run. folder: of what they print. gone: label -> why a peer was not measured.
    memory: 1e9 bytes per second of each round.
    """

    arguments: argparse.Namespace
    folder: Path
    peers: list[Peer] = field(default_factory=list)
    gone: dict[str, str] = field(default_factory=dict)
    memory: list[float] = field(default_factory=list)
    load_averages: list[float] = field(default_factory=list)

    def start(self) -> None:
        """One after the other: loading uses all cores."""
        for spec in self.arguments.peer:
            peer = self._spawn(spec)
            try:
                peer.facts = peer.listen(self.arguments.patience)
            except Gone as error:
                self.lose(peer, error)
            else:
                self.peers.append(peer)
                say(f"{spec.label}: {peer.facts}")

    def _spawn(self, spec: Spec) -> Peer:
        cases = self.arguments.case
        room = {
            "threads": self.arguments.threads,
            "batch": max(case.batch for case in cases),
            "prompt": max(case.prompt for case in cases),
            "new": max(case.new for case in cases),
        }
        threads = str(self.arguments.threads)
        python = dict(self.arguments.python).get(spec.kind, sys.executable)
        command = [python, str(WORKER), spec.kind, spec.path, spec.option, json.dumps(room)]
        errors = self.folder / f"{len(self.peers) + len(self.gone)}.log"
        with errors.open("w") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": threads, "TERRAZZO_THREADS": threads},
            )
        return Peer(spec, process, errors)

    def lose(self, peer: Peer, error: Gone) -> None:
        peer.close()
        self.gone[peer.spec.label] = str(error)
        self.peers = [each for each in self.peers if each is not peer]
        say(f"{peer.spec.label}: not measured, {error}")

    def rounds(self) -> None:
        for case in self.arguments.case:
            self._each(Case(case.batch, case.prompt, WARM_UP_NEW), seed=0)
        for peer in self.peers:
            peer.rates.clear()
            peer.others.clear()
        for number in range(1, self.arguments.rounds + 1):
            self.load_averages.append(os.getloadavg()[0])
            self._read_memory()
            for case in self.arguments.case:
                self._each(case, seed=number)
            say(f"round {number} of {self.arguments.rounds}: {time.monotonic() - BEGUN:.0f} s")

    def _read_memory(self) -> None:
        for peer in [each for each in self.peers if each.spec.kind == OURS][:1]:
            try:
                answer = peer.ask({"memory": True}, self.arguments.patience)
                self.memory.append(answer["memory_gb_per_s"])
            except (Gone, BrokenPipeError) as error:
                self.lose(peer, Gone(str(error)))

    def _each(self, case: Case, seed: int) -> None:
        for peer in list(self.peers):
            try:
                peer.measure(case, seed, self.arguments)
            except (Gone, BrokenPipeError) as error:
                self.lose(peer, Gone(str(error)))

    def close(self) -> None:
        for peer in self.peers:
            peer.close()

    def pairs(self) -> Iterable[tuple[Peer, Peer]]:
        """Each of ours with each of the others."""
        for ours in self.peers:
            if ours.spec.kind == OURS:
                yield from ((ours, peer) for peer in self.peers if peer.spec.kind != OURS)

    def to_json(self) -> dict[str, Any]:
        return {
            "machine": machine(),
            "threads": self.arguments.threads,
            "rounds": self.arguments.rounds,
            "load_averages": self.load_averages,
            "memory_read_gb_per_s": self.memory,
            "peers": [
                {
                    "label": peer.spec.label,
                    "facts": peer.facts,
                    "tokens_per_s": {
                        f"{case} {what}": rates for (case, what), rates in peer.rates.items()
                    },
                    "share_of_others": {f"{case}": each for case, each in peer.others.items()},
                }
                for peer in self.peers
            ],
            "ratios": [
                {
                    "of": ours.spec.label,
                    "to": peer.spec.label,
                    **{f"{case} {what}": each for (case, what), each in ratios(ours, peer).items()},
                }
                for ours, peer in self.pairs()
            ],
            "not_measured": self.gone,
        }

    def print(self) -> None:
        if self.memory:
            print(f"memory read: {spread(self.memory)} GB/s")
        for case in self.arguments.case:
            print(f"\n{case}: tokens/s, median (least to most) of {self.arguments.rounds} rounds")
            print(f"{'':44} {'prefill':>26} {'decode':>26} {'others':>8}")
            for peer in self.peers:
                row = [spread(peer.rates[case, what]) for what in ("prefill", "decode")]
                others = f"{max(peer.others[case]):.0%}"
                print(f"{peer.spec.label:44} {row[0]:>26} {row[1]:>26} {others:>8}")
        print("others: the largest share of the cores that others used in a round that counts")
        print("\nratios: median (least to most) over rounds of ours to theirs")
        for ours, peer in self.pairs():
            print(f"{ours.spec.label} to {peer.spec.label}")
            found = ratios(ours, peer)
            for case in self.arguments.case:
                row = [spread(found[case, what]) for what in ("prefill", "decode")]
                print(f"    {case!s:16} prefill {row[0]:24} decode {row[1]}")
        shares = [each for peer in self.peers for case in peer.others.values() for each in case]
        worst = max(shares, default=0.0)
        if worst > self.arguments.quiet:
            print(
                f"do not quote: others used up to {worst:.0%} of the cores, see the columns above"
            )
        for label, reason in self.gone.items():
            print(f"not measured: {label}: {reason}")


def ratios(ours: Peer, theirs: Peer) -> dict[tuple[Case, str], list[float]]:
    return {
        key: [mine / other for mine, other in zip(rates, theirs.rates[key], strict=True)]
        for key, rates in ours.rates.items()
    }


def spread(values: Sequence[float]) -> str:
    return f"{median(values):.4g} ({min(values):.4g} to {max(values):.4g})"


def busy_s() -> float:
    """Seconds that all cores were not idle since the machine started, taken by other guests too."""
    first = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0]
    user, nice, system, _, _, irq, softirq, steal = map(int, first.split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def process_s(process: int) -> float:
    """Seconds of all cores that the threads of a process have used."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def machine() -> dict[str, Any]:
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    lines = [line.partition(":") for line in cpuinfo.splitlines()]
    names = [value.strip() for name, _, value in lines if name.strip() == "model name"]
    cores = len(os.sched_getaffinity(0))
    return {"processor": names[:1], "cores": cores, "system": platform.platform()}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def interpreter(text: str) -> tuple[str, str]:
    kind, _, path = text.partition("=")
    if kind not in KINDS or not path:
        raise argparse.ArgumentTypeError(f"{text!r}; legal is KIND=INTERPRETER, {KINDS}")
    return kind, path


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--peer", type=Spec.parse, action="append", required=True)
    parser.add_argument("--python", type=interpreter, action="append", default=[])
    parser.add_argument("--case", type=Case.parse, action="append")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--patience", type=float, default=300.0, help="seconds for one answer")
    parser.add_argument("--quiet", type=float, default=0.1, help="share of the cores for others")
    parser.add_argument("--attempts", type=int, default=3, help="where it is not quiet")
    parser.add_argument("--json", type=Path, help="file to write everything to")
    arguments = parser.parse_args()
    arguments.case = arguments.case or [Case(1, 512, 128), Case(8, 64, 64)]
    return arguments


def main() -> None:
    arguments = parse_arguments()
    # Workers end with this process, also where it is told to stop.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory() as folder:
        run = Run(arguments, Path(folder))
        try:
            run.start()
            run.rounds()
        finally:
            run.close()
    run.print()
    if arguments.json:
        arguments.json.write_text(json.dumps(run.to_json(), indent=1), encoding="utf-8")


BEGUN = time.monotonic()

if __name__ == "__main__":
    main()
