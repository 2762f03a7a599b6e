#!/usr/bin/env bash
# One start of a job: runs a command as a job step, hands signals on to it, and requeues the job where that helps.
# Sourced by the .sbatch files, which call `job COMMAND ARGUMENT...` in the checkout.
#
# SLURM signals the batch shell alone (--signal=B:USR1@...); the trap hands USR1 to srun, and srun to the task, which
# saves and exits with 75. Only then the job is requeued. A failed node requeues it through --requeue.
# A TERM to the shell becomes USR1 too: srun takes TERM as an order to kill the task, without a save. When SLURM ends the
# job, the tasks have had a TERM of their own, and save: they get no other signal, and srun, which must not get that TERM
# with the shell's process group, has a session of its own.
# shellcheck disable=SC2154 # settings and words come from common.sh
set -euo pipefail
source scripts/slurm/common.sh

# The id of this job for scontrol. That of an array's last task is also the id of the whole array, so tasks are
# always named by array and number.
job_id() { printf '%s' "${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"; }

# The newest complete checkpoint of a run folder, 0 without one.
newest_update() {
  local path name newest=0
  for path in "$1"/checkpoints/*/integrity.json; do
    name="${path%/integrity.json}" name="${name##*/}"
    if [[ "$name" =~ ^[0-9]+$ ]] && ((10#$name > newest)); then
      newest=$((10#$name))
    fi
  done
  printf '%s' "$newest"
}

# What this job has done so far, as one word that changes when there is more of it.
progress() {
  local out made
  case "$command" in
    train) newest_update "$(option workdir "$@")" ;;
    prepare)
      made=("$(option out "$@")"/partial/*.json)
      if [[ -e "${made[0]}" ]]; then
        printf '%s' "${#made[@]}"
      else
        printf 0
      fi
      ;;
    sweep)
      out="$("$python" scripts/sweep.py "$@" --where 2>/dev/null || true)"
      newest_update "${out:-nowhere}"
      ;;
    *)
      out="$(option out "$@")"
      if [[ -f "$out" ]]; then
        cksum <"$out" | tr ' ' '-'
      else
        printf 0
      fi
      ;;
  esac
}

# stalled PROGRESS: whether the last starts, one more than `stalls`, all began with this progress.
stalled() {
  [[ -f "$starts" ]] || return 1
  local line count=0
  while read -r line; do
    if [[ "${line##* }" == "$1" ]]; then
      count=$((count + 1))
    else
      count=0
    fi
  done <"$starts"
  ((count > stalls))
}

# The state of the job; whether it is one in which SLURM itself ends the job.
state() { squeue --noheader --jobs="$(job_id)" --format=%T 2>/dev/null || true; }
ending() { [[ "$1" =~ ^(CANCELLED|COMPLET|PREEMPTED|TIMEOUT|FAILED) ]]; }

# forward SIGNAL: hands on the first signal only, since a second would end the task at once.
forward() {
  received=1
  if [[ -z "$asked" ]]; then
    asked="$1"
    say "SIG$1: asks the command to save"
  fi
  hand_on
}

hand_on() {
  if [[ -n "$asked" && -n "$child" && -z "$handed" ]]; then
    handed=1
    if [[ "$asked" == USR1 ]]; then
      kill -s USR1 "$child" 2>/dev/null || true
    else # behind the trap: one that waits for a command may lose the exit code of the child
      (ending "$(state)" || kill -s USR1 "$child") 2>/dev/null &
    fi
  fi
}

# Runs the words in the background and waits; `code` is their exit code, whatever signals arrive meanwhile.
run_and_wait() {
  local again
  "$@" &
  child=$!
  hand_on # a signal that came before there was a child
  code=0
  wait "$child" || code=$?
  while [[ -n "$received" ]]; do # the wait was cut short, and what it returned may be the signal's number
    received="" again=0
    wait "$child" || again=$?
    [[ "$again" == 127 ]] || code="$again" # 127: the child had ended, its code is known
  done
  child=""
}

meaning() {
  case "$1" in
    2) printf 'configuration' ;;
    3) printf 'data' ;;
    4) printf 'checkpoint or run folder' ;;
    5) printf 'non-finite update' ;;
    6) printf 'device' ;;
    130) printf 'interrupted' ;;
    137) printf 'killed, perhaps for lack of host memory' ;;
    *) printf 'failed' ;;
  esac
}

job() {
  command="$1" child="" asked="" handed="" received="" code=0
  shift
  trap 'forward USR1' USR1
  trap 'forward TERM' TERM
  load_settings
  find_words "$@"
  stalls="$(setting stalls)"
  [[ "$command" != bench ]] || shift
  local id folder before after now cpus cache number
  id="$(job_id)"
  folder="$(log_folder "$@")"
  mkdir -p -- "$folder"
  starts="$folder/slurm-$id.starts.log"
  find_python
  before="$(progress "$@")"
  number=$((${SLURM_RESTART_COUNT:-0} + 1))
  say "job $id, start $number on ${HOSTNAME:-?} ($(uname -m)), progress $before, $(date -u +%FT%TZ)"
  if stalled "$before"; then
    say "error: requeued $stalls times in a row without progress; find the reason above, then submit again"
    exit 1
  fi
  printf '%s start %s progress %s\n' "$(date -u +%FT%TZ)" "$number" "$before" >>"$starts"

  export PYTHONUNBUFFERED=1
  export XLA_PYTHON_CLIENT_MEM_FRACTION="${XLA_PYTHON_CLIENT_MEM_FRACTION:-$(setting memory_fraction)}"
  cache="$(setting compile_cache)"
  if [[ -n "$cache" ]]; then
    export LLAMA_JAX_COMPILE_CACHE="$cache"
  fi
  cpus="${SLURM_CPUS_PER_TASK:-${SLURM_CPUS_ON_NODE:-}}"
  local step=(setsid srun --export=ALL --nodes=1 --ntasks=1 --kill-on-bad-exit=1)
  [[ -z "$cpus" ]] || step+=(--cpus-per-task="$cpus") # srun does not take this over from sbatch
  if [[ -n "$asked" ]]; then # before there was anything to save
    code=75
  else
    run_and_wait "${step[@]}" "$python" "${words[@]}" "$@"
  fi
  if [[ -n "$asked" && ("$code" == 138 || "$code" == 1) ]]; then
    code=75 # too early for the command to listen (138), or for srun to begin the step, which it gave up then (1)
  fi

  if [[ "$code" == 0 ]]; then
    say "job $id: done"
    exit 0
  elif [[ "$code" != 75 ]]; then
    say "job $id: exit code $code ($(meaning "$code")), not requeued"
    exit "$code"
  fi
  now="$(state)"
  if ending "$now"; then
    say "job $id: saved; it is $now, so it is not requeued from here"
    exit 75
  fi
  after="$(progress "$@")"
  if stalled "$after"; then
    say "error: requeued $stalls times in a row without progress; find the reason above, then submit again"
    exit 75
  fi
  say "job $id: saved, requeued with progress $after"
  for _ in 1 2 3; do # the controller may be busy, or starting again
    ! scontrol requeue "$id" || exit 75
    sleep 20
  done
  say "error: job $id can't be requeued; submit the same command again, it continues"
  exit 75
}
