"""`terrazzo serve`: a model behind an OpenAI-compatible API."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from terrazzo.cli.loading import open_model
from terrazzo.engine.config import AUTO, DEFAULT_CONFIG, Auto, EngineConfig
from terrazzo.errors import ConfigError, UnsupportedError
from terrazzo.kernels.policy import KernelPolicy


def serve_command(
    folder: Path,
    /,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    served_model_name: str = "",
    api_key: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    max_model_len: int | Auto = AUTO,
    max_num_seqs: int = DEFAULT_CONFIG.max_num_seqs,
    max_num_batched_tokens: int = DEFAULT_CONFIG.max_num_batched_tokens,
    kv_cache_tokens: int | Auto = AUTO,
    memory_fraction: float = DEFAULT_CONFIG.memory_fraction,
    prefix_caching: bool = DEFAULT_CONFIG.prefix_caching,
    kernel_policy: KernelPolicy | Auto = AUTO,
    max_queue: int = 256,
    drain_seconds: int = 30,
    log_requests: bool = False,
) -> None:
    """Serve a model behind an OpenAI-compatible API.

    Ctrl-C finishes the requests that run; a second one drops them.

    Parameters
    ----------
    folder
        The model: a GPTQ checkpoint or an unquantized Hugging Face folder.
    host
        The address to listen on; 0.0.0.0 is every IPv4 address of this machine.
    port
        0 takes any free port.
    served_model_name
        How clients call the model; without it, the folder's name.
    api_key
        Clients must send it as a bearer token; give the option once for each key.
    max_model_len
        Longest prompt plus output in tokens; auto: the model's, cut to what memory holds.
    max_num_seqs
        Sequences that run at once; more wait.
    max_num_batched_tokens
        Most tokens of one step.
    kv_cache_tokens
        Capacity of the KV cache; auto: what max_num_seqs sequences need, if memory holds it.
    memory_fraction
        How much of the memory beside the weights an automatic KV cache may take.
    prefix_caching
        Reuse the work for equal prompt beginnings.
    kernel_policy
        speed keeps dequantized weights, memory keeps them small; auto: speed if that leaves room.
    max_queue
        Requests that may wait; more are answered with status 429.
    drain_seconds
        How long running requests may take to finish after Ctrl-C.
    log_requests
        Write one line for each request.
    """
    try:
        from terrazzo.server.app import create_app
        from terrazzo.server.listen import ListenOptions, bind, listen, url
        from terrazzo.server.prompts import ServedModel
        from terrazzo.server.worker import Worker
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"the server needs the package {error.name}; install terrazzo[serve]"
        ) from error

    for option, value in (("max_queue", max_queue), ("drain_seconds", drain_seconds)):
        if value < 0:
            raise ConfigError(f"{option} is {value}; legal values are 0 and above")
    config = EngineConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        kv_cache_tokens=kv_cache_tokens,
        memory_fraction=memory_fraction,
        prefix_caching=prefix_caching,
        kernel_policy=kernel_policy,
    )
    with bind(host, port) as bound:
        llm = open_model(folder, config, _say)
        name = served_model_name or folder.resolve().name
        model = ServedModel(
            name, int(time.time()), llm.max_model_len, llm.tokenizer, llm.default_params
        )
        worker = Worker(llm.engine, max_num_seqs + max_queue)
        address = url(bound, host)
        try:
            options = ListenOptions(
                on_ready=lambda: _say(f"ready: {name} at {address}/v1"),
                drain_seconds=drain_seconds,
                logs_requests=log_requests,
            )
            listen(create_app(model, worker, api_keys=api_key), bound, worker, options)
        finally:
            worker.close()
    _say("stopped")


def _say(text: str) -> None:
    print(text, flush=True)
