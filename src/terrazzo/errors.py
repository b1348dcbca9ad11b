"""Everything Terrazzo raises at its users, as one tree.

    TerrazzoError
    ├── ConfigError          a config file, option or argument is missing, malformed or illegal
    │   └── RuleError        a `dynamic` rule cannot be read or its pattern cannot be honoured
    ├── CheckpointError      the files of a checkpoint contradict themselves or each other
    │   ├── MissingFileError a folder, shard or tokenizer file is not there
    │   └── TensorError      a tensor is missing, left over, or of the wrong shape or dtype
    ├── UnsupportedError     the input is valid, but no code of ours can honour it
    │   └── NoKernelError    every kernel rejects a problem; the message lists each reason
    ├── QuantizationError    calibration or the GPTQ sweep cannot produce a sound weight
    └── RequestError         a generation request is illegal; the server answers 400

A message says what was seen, where (module, file), what is legal and what to do, in that order.
`raise` of this tree is for the user's world; `assert` is for our own invariants.
"""

from __future__ import annotations


class TerrazzoError(Exception):
    """Base of every error a user can cause; the command line prints it without a traceback."""


class ConfigError(TerrazzoError):
    """A config file, option or argument is missing, malformed or illegal."""


class RuleError(ConfigError):
    """A `dynamic` rule cannot be read, or its pattern cannot be honoured."""


class CheckpointError(TerrazzoError):
    """The files of a checkpoint contradict themselves or each other."""


class MissingFileError(CheckpointError):
    """A folder, shard or tokenizer file is not there."""


class TensorError(CheckpointError):
    """A tensor is missing, left over, or of the wrong shape or dtype."""


class UnsupportedError(TerrazzoError):
    """The input is valid, but no code of ours can honour it."""


class NoKernelError(UnsupportedError):
    """Every kernel rejects a problem; the message lists each kernel with its reason."""


class KernelError(TerrazzoError):
    """A kernel could not be compiled or started."""


class QuantizationError(TerrazzoError):
    """Calibration or the GPTQ sweep cannot produce a sound weight."""


class RequestError(TerrazzoError):
    """A generation request is illegal; the server answers 400."""
