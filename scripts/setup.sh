#!/usr/bin/env bash
# Makes .venv in this checkout and installs llama_jax into it. Run again at any time: nothing happens when it is up to date.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: bash scripts/setup.sh [--cpu | --cuda12 | --cuda13 | --tpu] [--jax=VERSION] [--dev]

  --cpu      JAX for the CPU (default)
  --cuda12   JAX for NVIDIA GPUs with CUDA 12; needs Python 3.12 or newer
  --cuda13   JAX for NVIDIA GPUs with CUDA 13; needs Python 3.12 or newer
  --tpu      JAX for Cloud TPUs
  --jax=V    this version of JAX with the newest of everything else, instead of the tested versions in constraints/
  --dev      also what the tests and checks need

On NVIDIA GPUs JAX 0.10.2 and 0.11.0 are refused: their float32 scatter-add, which the gradient of the embedding needs,
is a slow loop. 0.10.2 is the newest JAX for Python 3.11, hence Python 3.12.

environment:
  PYTHON     the Python to use (default: the first suitable one found, one with tested versions before others)
  VENV       the folder of the environment (default: .venv in the checkout)
TEXT
}

fail() {
  printf 'error: %s\n' "$*" >&2
  exit 2
}

device="" dev=0 jax=""
for argument in "$@"; do
  case "$argument" in
    --cpu | --cuda12 | --cuda13 | --tpu)
      [[ -z "$device" || "$device" == "${argument#--}" ]] || fail "--$device and $argument exclude each other"
      device="${argument#--}"
      ;;
    --dev) dev=1 ;;
    --jax=*)
      jax="${argument#--jax=}"
      [[ "$jax" =~ ^[0-9]+(\.[0-9]+)+$ ]] || fail "$argument: a version such as 0.11.2 is needed"
      ;;
    -h | --help)
      usage
      exit 0
      ;;
    *)
      usage >&2
      fail "unknown argument: $argument"
      ;;
  esac
done
device="${device:-cpu}"

cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
venv="${VENV:-.venv}"
minor=11
[[ "$device" == cuda* ]] && minor=12 # the newest JAX for Python 3.11 is excluded on NVIDIA

slow_scatter() { [[ "$device" == cuda* && ("$1" == 0.10.2 || "$1" == 0.11.0) ]]; }
refusal() { printf 'JAX %s has a slow scatter-add on NVIDIA GPUs, so not with --%s; take another version' "$1" "$device"; }
slow_scatter "$jax" && fail "$(refusal "$jax")"

suitable() { "$1" -c "import sys; sys.exit(sys.version_info < (3, $minor))" >/dev/null 2>&1; }

short_version() { "$1" -c 'import sys; print("%d%d" % sys.version_info[:2])'; }

find_python() {
  local candidate found=""
  if [[ -n "${PYTHON:-}" ]]; then
    suitable "$PYTHON" || fail "PYTHON=$PYTHON is no Python 3.$minor or newer that runs, which --$device needs"
    printf '%s\n' "$PYTHON"
    return
  fi
  for candidate in python3 python3.12 python3.11 python3.13 python3.14 python \
    "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[1-9]*/bin/python; do
    suitable "$candidate" || continue
    found="${found:-$candidate}"
    if [[ -f "constraints/py$(short_version "$candidate").txt" ]]; then
      printf '%s\n' "$candidate"
      return
    fi
  done
  if [[ -n "$found" ]]; then
    printf '%s\n' "$found"
    return
  fi
  fail "--$device needs Python 3.$minor or newer and found none; install one, or name it: PYTHON=/path/to/python3"
}

# The environment: kept when it works, made anew when its Python is gone or its making was cut off.
python="$venv/bin/python"
if [[ -x "$python" ]] && "$python" -m pip --version >/dev/null 2>&1; then
  suitable "$python" || fail "$venv holds $("$python" --version), --$device needs Python 3.$minor or newer: remove it or set VENV"
  if [[ -n "${PYTHON:-}" ]]; then
    suitable "$PYTHON" || fail "PYTHON=$PYTHON is no Python 3.$minor or newer that runs, which --$device needs"
    [[ "$(short_version "$PYTHON")" == "$(short_version "$python")" ]] ||
      fail "$venv holds $("$python" --version), PYTHON=$PYTHON is $("$PYTHON" --version): remove it or set VENV"
  fi
else
  [[ ! -e "$venv" || -d "$venv" ]] || fail "$venv is no folder: set VENV to a new one"
  if [[ -e "$venv" && ! -f "$venv/pyvenv.cfg" ]]; then # making it anew empties the folder
    for name in "$venv"/* "$venv"/.[!.]*; do
      [[ ! -e "$name" && ! -L "$name" ]] || fail "$venv holds ${name##*/} and is no environment: set VENV to a new folder"
    done
  fi
  base="$(find_python)"
  printf 'setup: making %s with %s (%s)\n' "$venv" "$("$base" --version)" "$(command -v -- "$base")"
  "$base" -m venv --clear -- "$venv" || fail "$base cannot make a virtual environment; on Debian: apt-get install python3-venv"
fi

extras=(prepare report)
[[ "$device" == cpu ]] || extras+=("$device")
[[ "$dev" == 0 ]] || extras+=(test)

# The stamp says which extras were installed from which pyproject, constraints and checkout.
version="$(short_version "$python")"
constraints="constraints/py$version.txt"
inputs=(pyproject.toml)
if [[ -n "$jax" ]]; then
  constraints=""
elif [[ -f "$constraints" ]]; then
  inputs+=("$constraints")
  pinned="$(sed -n 's/^jax==//p' -- "$constraints")"
  slow_scatter "$pinned" && fail "$constraints: $(refusal "$pinned") with --jax=VERSION"
fi
digest="$("$python" - "$jax" "${inputs[@]}" <<'CODE'
import hashlib, pathlib, sys

state = hashlib.sha256(f"{pathlib.Path.cwd()}\n{sys.argv[1]}".encode())
for name in sys.argv[2:]:
    state.update(pathlib.Path(name).read_bytes())
print(state.hexdigest())
CODE
)"
stamp="$venv/llama_jax.stamp"
have=""
if [[ -f "$stamp" ]]; then
  { read -r installed_digest && read -r installed; } <"$stamp" || true
  for other in cuda12 cuda13 tpu; do # two accelerator plugins in one environment would fight over the device
    if [[ " ${installed:-} " == *" $other "* && "$device" != cpu && "$device" != "$other" ]]; then
      fail "$venv was set up with --$other; remove it or set VENV to another folder for --$device"
    fi
  done
  [[ "${installed_digest:-}" != "$digest" ]] || have="${installed:-}"
  for extra in ${installed:-}; do # what was there before stays
    [[ " ${extras[*]} " == *" $extra "* ]] || extras+=("$extra")
  done
fi
missing=0
for extra in "${extras[@]}"; do
  [[ " $have " == *" $extra "* ]] || missing=1
done
if [[ "$missing" == 0 ]]; then
  printf 'setup: %s is up to date (Python %s; %s)\n' "$venv" "${version/3/3.}" "${extras[*]}"
  exit 0
fi

target=".[$(IFS=,; printf '%s' "${extras[*]}")]"
pins=()
if [[ -n "$jax" ]]; then
  pins=("jax==$jax")
  printf 'setup: installing llama_jax%s into %s with JAX %s and the newest of everything else\n' \
    "${target#.}" "$venv" "$jax"
elif [[ -f "$constraints" ]]; then
  pins=(--constraint "$constraints")
  printf 'setup: installing llama_jax%s into %s with the versions of %s\n' "${target#.}" "$venv" "$constraints"
else
  printf 'setup: installing llama_jax%s into %s; no pinned versions for this Python, taking the newest\n' "${target#.}" "$venv"
fi
# While pip works the stamp has no digest: an installation that is cut off is made again, and its accelerator is known.
printf -- '-\n%s\n' "${extras[*]}" >"$stamp"
log="$venv/setup.log"
printf 'setup: this takes a minute or more; what pip says goes to %s\n' "$log"
if ! "$python" -m pip install --progress-bar off "${pins[@]}" --editable "$target" >"$log" 2>&1; then
  tail -n 20 -- "$log" >&2
  fail "the installation failed; everything pip said is in $log"
fi
installed_jax="$("$python" -c 'from importlib.metadata import version; print(version("jax"))')"
slow_scatter "$installed_jax" && fail "$(refusal "$installed_jax") with --jax=VERSION"
printf '%s\n%s\n' "$digest" "${extras[*]}" >"$stamp.new"
mv -- "$stamp.new" "$stamp"
printf 'setup: done, JAX %s for %s; use it with: source %s/bin/activate\n' "$installed_jax" "$device" "$venv"
