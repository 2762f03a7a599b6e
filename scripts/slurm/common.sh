#!/usr/bin/env bash
# What submit.sh and the jobs share: settings, the environment, commands and their folders. Sourced in the checkout.
# shellcheck disable=SC2034,SC2154 # the settings come from files, and what is set here is used by those that source it
set -euo pipefail

fail() {
  printf 'error: %s\n' "$*" >&2
  exit 2
}

say() { printf 'slurm: %s\n' "$*"; }

own_commands="train|prepare|sweep|bench|evaluate|export|generate|verify|describe|report" # that settings can be for

# The names of the settings, with | between.
known_settings() { sed -nE 's/^([a-z_]+)=.*/\1/p' scripts/slurm/site.conf.example | paste -sd '|'; }

# The settings: those of the example file, then the site's own, none of which may be misspelt. None comes from outside.
# shellcheck source=/dev/null
load_settings() {
  [[ -f scripts/slurm/site.conf.example ]] || fail "$PWD is not the checkout of llama_jax: start there"
  local name known file="${LLAMA_JAX_SITE:-scripts/slurm/site.conf}"
  known="$(known_settings)"
  while IFS= read -r name; do
    [[ ! "$name" =~ ^($own_commands|given)_($known)$ ]] || unset "$name"
  done < <(compgen -A export)
  source scripts/slurm/site.conf.example
  if [[ -f "$file" ]]; then
    check_names "$file" "$known"
    # shellcheck disable=SC2064 # the name of the file as it is now
    trap "printf 'error: %s: a command in it failed, or ends the shell\n' ${file@Q} >&2; exit 2" EXIT
    source <(cat -- "$file" && printf '\n:\n') # with `:` at its end, since a test that is false may stand there
    trap - EXIT
  elif [[ -n "${LLAMA_JAX_SITE:-}" ]]; then
    fail "LLAMA_JAX_SITE=$file does not exist"
  fi
}

# check_names FILE KNOWN: refuses a file that sets what is no setting, with or without a command in front. Variables of
# its own it can export. What stands behind ; && || then else do { or ) counts as a line of its own, a comment not.
check_names() {
  local name line
  while IFS= read -r line || [[ -n "$line" ]]; do
    [[ "$line" != *$'\r' ]] || fail "$1 has the line ends of Windows; take them out: sed -i 's/\\r$//' FILE"
    [[ ! "$line" =~ ^[[:space:]]*(declare|typeset|local)[[:space:]] ]] ||
      fail "$1: ${BASH_REMATCH[1]} would not last; a setting is NAME=VALUE, a variable of your own export NAME=VALUE"
    [[ ! "$line" =~ ^[[:space:]]*export[[:space:]]+([a-z_][a-z_0-9]*)= || "${BASH_REMATCH[1]}" == *_proxy ]] ||
      fail "$1: export ${BASH_REMATCH[1]}: small letters are for settings, which need no export; write your own in capitals"
    [[ "$line" =~ ^[[:space:]]*([A-Za-z_][A-Za-z_0-9]*)\+?= ]] || continue
    name="${BASH_REMATCH[1]}"
    [[ "$name" =~ ^(($own_commands)_)?($2)$ ]] ||
      fail "$1: $name is no setting (see scripts/slurm/site.conf.example; a variable of your own needs export before it)"
  done < <(sed -E 's/(^|[[:space:]])#.*//; s/([;{)]|&&|\|\||\<(then|else|do))[[:space:]]+/\n/g' <"$1")
}

# setting NAME: given on the command line, for this command in the file, or for all.
setting() {
  local given="given_$1" own="${command}_$1"
  printf '%s' "${!given-${!own-${!1}}}"
}

# option NAME ARGUMENT...: the value of the last --NAME=VALUE or --NAME VALUE among the arguments.
option() {
  local name="--$1" found=""
  shift
  while (($#)); do
    case "$1" in
      "$name="*) found="${1#*=}" ;;
      "$name") (($# < 2)) || found="$2" ;;
    esac
    shift
  done
  printf '%s' "$found"
}

# The words that Python runs for a command; the array `words`. A benchmark's name is the first argument.
find_words() {
  case "$command" in
    train) words=(-m llama_jax.main) ;;
    prepare | verify) words=(-m "data_pipeline.$command") ;;
    evaluate | export | generate | describe) words=(-m "llama_jax.$command") ;;
    sweep | report) words=("scripts/$command.py") ;;
    bench)
      [[ "${1:-}" =~ ^[a-z_]+$ && -f "bench/$1.py" ]] || fail "bench needs a module of bench/, not ${1:-nothing}"
      words=(-m "bench.$1")
      ;;
    *) fail "unknown command: $command" ;;
  esac
}

# The folder of a command's console logs: that of the run where there is one.
log_folder() {
  local out
  case "$command" in
    train)
      out="$(option workdir "$@")"
      [[ -n "$out" ]] || fail "train needs --workdir=FOLDER, the run folder: its console log goes there too"
      ;;
    sweep | prepare)
      out="$(option out "$@")"
      [[ -n "$out" ]] || fail "$command needs --out=FOLDER"
      [[ "$command" == sweep ]] || out="$(without_slashes "$out").logs" # a token cache holds nothing else
      ;;
    *)
      out="$(option run "$@")"
      out="${out:-runs/slurm}"
      ;;
  esac
  [[ "$out" != *\\* ]] || fail "$out: sbatch can't write a log to a path with a backslash"
  [[ "$out" != "~"* ]] || fail "$out: the shell leaves ~ as it is behind =; write \$HOME"
  without_slashes "$out"
}

# A path without slashes at its end, which completion leaves there.
without_slashes() {
  local path="$1"
  while [[ "$path" == ?*/ ]]; do path="${path%/}"; done
  printf '%s' "$path"
}

# Sets `python`: LLAMA_JAX_PYTHON as it is, or that of the environment, which one process at a time makes or updates.
find_python() {
  if [[ -n "${LLAMA_JAX_PYTHON:-}" ]]; then
    python="$LLAMA_JAX_PYTHON"
    export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
    return
  fi
  local folder lock base
  folder="$(setting venv)" base="$(setting python)"
  mkdir -p -- "$(dirname -- "$folder")"
  exec {lock}>>"$folder.lock"
  flock "$lock" || fail "$folder.lock: this file system has no locks; name another place as venv in site.conf"
  if [[ -n "$base" ]]; then
    export PYTHON="$base"
  fi
  VENV="$folder" bash scripts/setup.sh "$(setting setup)"
  exec {lock}>&-
  python="$folder/bin/python"
}
