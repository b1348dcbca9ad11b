#!/usr/bin/env bash
# Check Terrazzo against the real GPTQModel, in both directions, in an environment of its own.
#
#   scripts/interop.sh [arguments of pytest]
#
# GPTQModel is no dependency of Terrazzo: it is installed only here, into .venv-interop (about 6 GB,
# because its torch comes with CUDA). TERRAZZO_SMOLLM2=folder adds the tests on a real model.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
environment=.venv-interop
requirements=(torch==2.14.1 gptqmodel==7.7.0 transformers==5.24.0 optimum==2.3.0 pytest hypothesis)

if [[ ! -x $environment/bin/python ]]; then
  "$python" -m venv "$environment"
  echo '*' > "$environment/.gitignore"
fi
# GPTQModel compiles the few CPU helpers it needs when they are first used; nothing is built ahead.
BUILD_CUDA_EXT=0 "$environment/bin/python" -m pip install --quiet "${requirements[@]}"
"$environment/bin/python" -m pip install --quiet --editable .

# More GPTQModel workers than cores starve a small machine; its Torch kernel needs no compiler.
export GPTQMODEL_CPU_WORKERS=${GPTQMODEL_CPU_WORKERS:-2}
export TORCHDYNAMO_DISABLE=1
# GPTQModel and its dependencies warn at will: here only our assertions count.
exec "$environment/bin/python" -m pytest tests/interop -W ignore "$@"
