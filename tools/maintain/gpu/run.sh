#!/usr/bin/env bash
# bash run.sh OUT [--resume] [--device cpu] [--slower N]: install the bundle into a fresh folder, run the stages. README.md says more.
set -u
out=${1:?"usage: run.sh OUT [--resume] [--device cpu] [--slower N]"}
shift
first=$(cd "$(dirname "$0")/../.." && pwd) # folder 1 of the bundle
site=$(mktemp -d)
unset PYTHONDONTWRITEBYTECODE # a dozen processes import vLLM: the first one leaves its bytecode
trap 'rm -rf "$site"' EXIT
export PYTHONPATH=$first PATH=$site/bin:$PATH PYTHONUNBUFFERED=1
# A wheel is a zip file, which has a checksum of each of its files: pip refuses a damaged one.
python3 -m pip install --quiet --no-index --no-deps --no-compile --disable-pip-version-check \
    --target "$site/packages" "$first"/../*/*.whl || exit 2
echo "installed into $site in $SECONDS s"
export PYTHONPATH=$site/packages:$first PATH=$site/packages/bin:$PATH
python3 -m maintain.gpu.stages "$out" "$@"
