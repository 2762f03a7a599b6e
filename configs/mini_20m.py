"""The 20M recipe on the offline mini corpus: about 2 targets per parameter, a check of the whole path without C4.

    python -m data_pipeline.prepare --source=mini --out=data/mini
    python -m llama_jax.main --config=configs/mini_20m.py --workdir=runs/mini_20m

The corpus is small, so the run sees it several times: its validation loss says nothing about English C4. Everything but
the data, the budget and the warm-up is configs/c4_20m.py. That config warms up over 312 updates, which is this whole
run; a quarter of it is what this learning rate needs: 5, 10 and 25 % ended at 5.2, 5.1 and 4.6 nats on an H200.
"""

from llama_jax.config import default


def get_config():
    config = default()
    config.name = "mini_20m"
    config.training.targets_per_parameter = 2.0
    config.lr_schedule.warmup_steps = None
    config.lr_schedule.warmup_fraction = 0.25
    config.data.path = "data/mini"
    return config
