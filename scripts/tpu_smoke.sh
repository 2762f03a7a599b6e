#!/usr/bin/env bash
# A few real updates on a TPU: trains, stops and continues, evaluates, samples, and compares with an unbroken run.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: bash scripts/tpu_smoke.sh [--device=tpu] [--config=configs/smoke.py] [--updates=60] [--out=runs/tpu_smoke]
                                 [--config.FIELD=VALUE ...]

Trains a config on the built-in synthetic language, so that no data are needed, twice: once unbroken, once stopped by
SIGUSR1, saved with exit code 75, and continued by the same command. Then it evaluates, writes sample ids, and checks
that every update was made once, that the loss fell, and that both runs end at one validation loss.

  --device=D   tpu, gpu or cpu: required, never replaced by another
  --updates=N  optimizer updates of a run
  --out=DIR    a new folder for the runs

The shapes of the 20M model: --config=configs/c4_20m.py --updates=20 --config.training.batch_targets=16384
--config.training.microbatch=16. PYTHON and VENV choose another interpreter and environment, as in scripts/setup.sh.
TEXT
}

fail() {
  printf 'error: %s\n' "$*" >&2
  exit "$code"
}

code=1 device=tpu config=configs/smoke.py updates=60 out=runs/tpu_smoke
fields=()
for argument in "$@"; do
  case "$argument" in
    --device=tpu | --device=gpu | --device=cpu) device="${argument#--device=}" ;;
    --config=?*) config="${argument#--config=}" ;;
    --updates=?*) updates="${argument#--updates=}" ;;
    --out=?*) out="${argument#--out=}" ;;
    --config.?*=*) fields+=("$argument") ;;
    -h | --help)
      usage
      exit 0
      ;;
    *)
      usage >&2
      code=2 fail "unknown argument: $argument"
      ;;
  esac
done

[[ "$updates" =~ ^([2-9]|[1-9][0-9]+)$ ]] || code=2 fail "--updates=$updates: 2 or more, so that a loss can fall"
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
[[ ! -e "$out" ]] || code=2 fail "$out is there already: remove it, or name another folder with --out"
python="${VENV:-.venv}/bin/python"
if [[ ! -x "$python" ]]; then
  [[ "$device" != gpu ]] || code=2 fail "no environment: run bash scripts/setup.sh --cuda13 or --cuda12 first"
  bash scripts/setup.sh "--$device"
fi

fields=(
  "--config.runtime.device=$device"
  --config.data.source=synthetic
  --config.training.targets_per_parameter=None
  --config.training.total_targets=None
  "--config.training.total_updates=$updates"
  --config.lr_schedule.warmup_steps=None
  --config.lr_schedule.warmup_fraction=0.1
  --config.log.every_updates=1
  "${fields[@]}"
)
started=$SECONDS
step() { printf '\n[%4ds] %s\n' "$((SECONDS - started))" "$1"; }
train() { "$python" -m llama_jax.main --config="$config" --workdir="$out/$1" "${fields[@]}"; }

step "What it comes to"
"$python" -m llama_jax.describe --config="$config" "${fields[@]}"

step "A run without interruption: $out/unbroken"
train unbroken

step "A run that is told to stop as soon as it has begun: $out/broken"
"$python" -m llama_jax.main --config="$config" --workdir="$out/broken" "${fields[@]}" &
run=$!
trap 'kill "$run" 2>/dev/null || true' EXIT # whoever stops this script stops the run too
until [[ -e "$out/broken/config.json" ]] || ! kill -0 "$run" 2>/dev/null; do sleep 0.1; done
kill -USR1 "$run" 2>/dev/null || true
code=0
wait "$run" || code=$?
trap - EXIT
[[ "$code" == 75 ]] || code=1 fail "the stopped run ended with $code instead of 75"

step "The same command continues it"
train broken

step "Evaluation and samples"
"$python" -m llama_jax.evaluate --run="$out/broken" --config.runtime.device="$device" | tee "$out/evaluation.json"
"$python" -m llama_jax.generate --model="$out/broken" --tokens=8 --samples=1

step "Checks"
"$python" - "$out" "$updates" "$device" <<'CODE'
import json
import pathlib
import sys

out, updates, device = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]


def check(good, text):
    print(("ok      " if good else "FAILED  ") + text)
    return good


def losses(name):
    lines = map(json.loads, (out / name / "metrics.jsonl").read_text().splitlines())
    return {line["update"]: line["loss"] for line in lines if line["kind"] == "train"}


results = {name: json.loads((out / name / "result.json").read_text()) for name in ("unbroken", "broken")}
again = json.loads((out / "evaluation.json").read_text())["loss"]
lines = [json.loads(line) for line in (out / "broken/metrics.jsonl").read_text().splitlines()]
trained = [line["update"] for line in lines if line["kind"] == "train"]
environment = json.loads((out / "broken/environment.json").read_text())
platforms = {start["device"]["platform"] for start in environment["starts"]}
first, last = losses("unbroken")[1], losses("unbroken")[updates]
a, b = (result["validation_loss"] for result in results.values())
# On one CPU the runs are equal bit for bit; fast kernels of an accelerator add in an order of their own.
close = 0 if device == "cpu" else 0.05
good = [
    check(platforms == {device}, f"ran on {', '.join(platforms)}"),
    check(len(environment["starts"]) == 2, "the broken run was started twice"),
    check(trained == list(range(1, updates + 1)), f"it made each of {updates} updates once"),
    check(last < first, f"the loss fell from {first:.4f} to {last:.4f} nats"),
    check(abs(a - b) <= close, f"validation losses {a:.6f} unbroken and {b:.6f} broken differ by at most {close}"),
    check(abs(again - b) < 1e-3, f"its checkpoint evaluates to {again:.6f}"),
]
sys.exit(0 if all(good) else 1)
CODE
printf '\nAll of it worked on %s in %d s.\n' "$device" "$((SECONDS - started))"
