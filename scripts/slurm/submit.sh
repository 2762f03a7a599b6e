#!/usr/bin/env bash
# Submits a command of the project to SLURM; usage below.
# shellcheck disable=SC2154 # settings and words come from common.sh
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: bash scripts/slurm/submit.sh [OPTION ...] COMMAND [ARGUMENT ...]

COMMAND and its arguments are those of the project's own commands:
  train       python -m llama_jax.main; needs --workdir=FOLDER
  prepare     python -m data_pipeline.prepare; with --slices=N an array of N tasks, and a job that merges their work
  sweep       python scripts/sweep.py: for each stage an array with one run a task, and a job that makes the table
  bench NAME  python -m bench.NAME
  evaluate, export, generate, describe, verify, report
  setup       makes or updates the environment here and now, without a job: on a login node of the same architecture

Options, which win over scripts/slurm/site.conf (copy it from site.conf.example):
  --account=A --partition=P --time=T --memory=M --gpus=N --gpu-type=NAME --cpus=N|auto
  --signal-minutes=N   save and requeue so long before the time limit
  --slices=N           prepare: tasks of the array
  --at-once=N          tasks of an array that may run at the same time
  --after=JOB          start when this job has succeeded
  --sbatch=OPTION      any other option of sbatch, as often as needed: --sbatch=--qos=long
  --dry-run            print what would be submitted

Paths are relative to the checkout. Console logs go into the run folder, DIR.logs beside a token cache, or runs/slurm.
Needs no environment but for sweep, which counts its runs. LLAMA_JAX_PYTHON names a Python to use as it is.
TEXT
}

cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."
source scripts/slurm/common.sh

# minutes_of TIME: a time limit of sbatch in minutes, rounded down; nothing for an empty one or another form.
minutes_of() {
  local days="" fields
  [[ "$1" =~ ^(([0-9]+)-)?([0-9]+(:[0-9]+){0,2})$ ]] || return 0
  days="${BASH_REMATCH[2]}"
  IFS=: read -ra fields <<<"${BASH_REMATCH[3]}"
  if [[ -n "$days" || "${#fields[@]}" == 3 ]]; then # [DAYS-]HOURS[:MINUTES[:SECONDS]]
    printf '%s' "$(((10#${days:-0} * 24 + 10#${fields[0]}) * 60 + 10#${fields[1]:-0}))"
  else # MINUTES[:SECONDS]
    printf '%s' "$((10#${fields[0]}))"
  fi
}

[[ "${1:-}" == -h || "${1:-}" == --help ]] || load_settings # before there are names that it could change
slices="" at_once="" after="" dry=0 extra=() queued=()
while (($#)); do
  case "$1" in
    -h | --help)
      usage
      exit 0
      ;;
    --account=* | --partition=* | --time=* | --memory=* | --gpus=* | --gpu-type=* | --cpus=* | --signal-minutes=*)
      name="${1%%=*}" name="${name#--}"
      declare "given_${name//-/_}=${1#*=}"
      ;;
    --slices=?*) slices="${1#*=}" ;;
    --at-once=?*) at_once="${1#*=}" ;;
    --after=?*) after="${1#*=}" ;;
    --sbatch=-?*) extra+=("${1#*=}") ;;
    --dry-run) dry=1 ;;
    -*)
      usage >&2
      fail "unknown option: $1; values stand behind =, as in --time=01:00:00"
      ;;
    *) break ;;
  esac
  shift
done
(($#)) || {
  usage >&2
  fail "a command is missing"
}
command="$1"
shift
case "$(setting setup)" in
  --cuda13 | --cuda12 | --cpu) ;;
  *) fail "setup = $(setting setup): --cuda13, --cuda12 or --cpu" ;;
esac
if [[ "$command" == setup ]]; then
  (($# == 0)) || fail "setup takes no arguments, not $1; site.conf chooses the device, with setup=--cuda13 or another"
  [[ "$dry" == 0 ]] || fail "--dry-run is for jobs, and setup is none: it begins at once"
  find_python
  say "the environment is ready: $python"
  exit 0
fi
find_words "$@"
for word in "$@"; do
  name="${word%%=*}"
  case "$name" in
    --stage | --task | --tasks | --table | --where | --devices)
      [[ "$command" != sweep ]] || fail "$word: the jobs of a sweep have their own"
      ;;
    -h | --help) fail "$word needs no job: python ${words[*]} $word" ;;
    --account | --partition | --time | --memory | --gpus | --gpu-type | --cpus | --signal-minutes | --slices | --at-once | \
      --after | --sbatch | --dry-run) fail "$name is an option of the job: it stands before $command" ;;
  esac
done
run="$(option run "$@")" # it may be what --after waits for
[[ -z "$run" || -n "$after" || -d "$run" ]] || fail "--run=$run is no folder"
for name in slices at_once; do
  [[ "${!name:-1}" =~ ^[1-9][0-9]{0,4}$ ]] || fail "--${name//_/-}=${!name}: a number from 1 is needed"
done
for name in gpus stalls; do
  [[ "$(setting "$name")" =~ ^(0|[1-9][0-9]{0,8})$ ]] || fail "$name = $(setting "$name") is no number of up to 9 digits"
done
minutes="$(setting signal_minutes)"
[[ "$minutes" =~ ^[1-9][0-9]{0,4}$ ]] || fail "signal_minutes = $minutes is no number from 1 to 1092"
[[ -z "$after" || "$after" =~ ^[0-9][0-9_]*$ ]] || fail "--after=$after: the number of a job is needed"
limit="$(minutes_of "$(setting time)")"
[[ -z "$limit" ]] || ((limit == 0 || limit > minutes)) || # 0: none
  fail "time = $(setting time) is no longer than signal_minutes = $minutes: the job would be asked to save at its start"
((minutes <= 1092)) || fail "signal_minutes = $minutes: 1092 is the most, since sbatch --signal takes up to 65535 seconds"
share="$(setting memory_fraction)"
[[ "$share" =~ ^(0?\.[0-9]*[1-9][0-9]*|1(\.0*)?)$ ]] || fail "memory_fraction = $share is no number above 0, up to 1"
if declare -p "${command}_sbatch_options" >/dev/null 2>&1; then # setting() hands on no arrays
  declare -n own_options="${command}_sbatch_options"
  sbatch_options=("${own_options[@]}")
fi
for word in "${sbatch_options[@]}"; do # an empty word would stand for the script
  [[ "$word" == -* ]] || fail "sbatch_options: '$word' is no option; write sbatch_options=(--qos=normal --exclude=node17)"
done
# From inside a job these would reach the new one, and srun there would take them for its own.
unset "${!SLURM_ARRAY_@}" "${!SLURM_MEM_@}" SLURM_CPUS_PER_TASK SLURM_TRES_PER_TASK SLURM_RESTART_COUNT
[[ -z "$slices" || "$command" == prepare ]] || fail "--slices is for prepare"
[[ -z "$at_once" || -n "$slices" || "$command" == sweep ]] || fail "--at-once is for arrays: a sweep, or --slices=N prepare"
if [[ -n "$slices" ]]; then
  for word in "$@"; do
    case "$word" in
      --slice | --slice=*) fail "--slices makes the slices; leave out $word" ;;
      --download) fail "--download with --slices: each task would fetch everything; fetch it without --slices first" ;;
    esac
  done
fi

# CPUs of a job: a node's share for its GPUs, the least among the nodes of the partition; empty where sinfo can't tell.
share_of_cpus() { # its local names must not be those of settings
  local words=(sinfo --noheader --format="%c %G") wanted total gres count share least=""
  wanted="$(setting gpus)"
  [[ -z "$(setting partition)" ]] || words+=(--partition="$(setting partition)")
  while read -r total gres; do
    total="${total%+}" count=1
    [[ "$total" =~ ^[1-9][0-9]*$ ]] || continue
    [[ ! "$gres" =~ gpu:([^:,\(]+:)?([0-9]+) ]] || count="${BASH_REMATCH[2]}"
    share=$((total * (wanted > 1 ? wanted : 1) / (count > 0 ? count : 1)))
    ((share <= total)) || share="$total"
    if ((share > 0)) && [[ -z "$least" || "$share" -lt "$least" ]]; then
      least="$share"
    fi
  done < <("${words[@]}" 2>/dev/null || true)
  printf '%s' "$least"
}

# submit WHAT ARRAY DEPENDENCY LOGS ARGUMENT...: sets `job` to the id.
submit() {
  local what="$1" array="$2" dependency="$3" logs="$4" name value pattern="%j" words=(sbatch --parsable)
  shift 4
  case "$logs" in
    /*) ;;
    *) logs="$PWD/$logs" ;;
  esac
  name="${logs##*/}" name="${name%.logs}"
  [[ "$command" != bench ]] || name="${2:-}"
  name="llama_jax-$command-${name//[^A-Za-z0-9._-]/_}"
  words+=(--chdir="$PWD" --job-name="${name:0:100}" --signal="B:USR1@$((60 * minutes))")
  for name in account partition time; do
    value="$(setting "$name")"
    [[ -z "$value" ]] || words+=("--$name=$value")
  done
  value="$(setting memory)"
  [[ -z "$value" ]] || words+=(--mem="$value")
  value="$(setting gpu_type)"
  [[ "$(setting gpus)" == 0 ]] || words+=(--gres="gpu:${value:+$value:}$(setting gpus)")
  value="$(setting cpus)"
  [[ "$value" != auto ]] || value="$(share_of_cpus)"
  [[ -z "$value" ]] || words+=(--cpus-per-task="$value")
  if [[ -n "$array" ]]; then
    words+=(--array="$array${at_once:+%$at_once}")
    pattern="%A_%a"
  fi
  [[ -z "$dependency" ]] || words+=(--dependency="afterok:$dependency" --kill-on-invalid-dep=yes)
  words+=(--output="${logs//%/%%}/slurm-$pattern.log" "${sbatch_options[@]}" "${extra[@]}")
  if [[ "$dry" == 1 ]]; then
    printf '%q ' "${words[@]}" "$@"
    printf '\n'
    job=JOB
    return
  fi
  mkdir -p -- "$logs"
  job="$("${words[@]}" "$@")" ||
    fail "sbatch refused it${queued[*]:+; jobs before it are queued, take them back with: scancel ${queued[*]}}"
  job="${job%%;*}" # with several clusters the name of one follows
  queued+=("$job")
  say "job $job: $what; console in $logs/slurm-$job${array:+_*}.log"
}

folder="$(log_folder "$@")"
script="scripts/slurm/$command.sbatch"
case "$command" in
  prepare)
    if [[ -n "$slices" ]]; then
      submit "prepare, $slices slices" "0-$((slices - 1))" "$after" "$folder" "$script" "$slices" "$@"
      submit "prepare, merging the slices" "" "$job" "$folder" "$script" "$@"
    else
      submit prepare "" "$after" "$folder" "$script" "$@"
    fi
    ;;
  sweep)
    find_python
    counts="$("$python" scripts/sweep.py "$@" --tasks)" || exit
    stage=0
    while read -r count name; do
      stage=$((stage + 1))
      submit "stage $name, $count runs" "0-$((count - 1))" "$after" "$folder" "$script" "$@" --stage="$stage"
      after="$job"
    done <<<"$counts"
    declare "given_gpus=0" # the table needs none
    submit "the table" "" "$after" "$folder" "$script" "$@" --table
    ;;
  train | bench) submit "$command" "" "$after" "$folder" "$script" "$@" ;;
  *) submit "$command" "" "$after" "$folder" scripts/slurm/command.sbatch "$command" "$@" ;;
esac
