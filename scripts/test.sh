#!/usr/bin/env bash
# Lint, formatting, types and tests. Makes the environment when there is none. Arguments go to pytest:
#   bash scripts/test.sh                          everything
#   bash scripts/test.sh tests/test_config.py -x  some tests
# PYTHON and VENV choose another interpreter and environment, as in scripts/setup.sh.
set -euo pipefail

if [[ "${1:-}" == "--help" || "${1:-}" == "-h" ]]; then
  sed -n '2,5s/^# //p' -- "${BASH_SOURCE[0]}"
  exit 0
fi
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh --dev
bin="${VENV:-.venv}/bin"

# Whatever the checks write goes below build/, which git ignores.
scratch="$PWD/build/test"
mkdir -p -- "$scratch/home" "$scratch/tmp"
export HOME="$scratch/home" XDG_CACHE_HOME="$scratch/home/.cache" TMPDIR="$scratch/tmp"
export MPLCONFIGDIR="$scratch/home/matplotlib" HYPOTHESIS_STORAGE_DIRECTORY="$scratch/hypothesis"
export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1

state() { # what git sees, with the ignored files that are not caches of these checks or the environment
  git status --porcelain --ignored 2>/dev/null |
    grep -vE '(__pycache__|\.pytest_cache|\.ruff_cache|\.mypy_cache|\.egg-info|/?\.venv[^/]*|^!! build)/$' || true
}
before="$(state)"

"$bin/ruff" check .
"$bin/ruff" format --check .
"$bin/mypy"

workers=2 # a worker compiles and runs JAX on about one core
[[ $# == 0 ]] || workers=0
code=0
"$bin/python" -m pytest -n "$workers" --dist loadfile "$@" || code=$?
rm -rf -- "$scratch/tmp"

after="$(state)"
if [[ "$before" != "$after" ]]; then
  printf 'error: the tests left files behind in the checkout:\n' >&2
  diff <(printf '%s\n' "$before") <(printf '%s\n' "$after") >&2 || true
  exit 1
fi
exit "$code"
