"""The recipe of configs/sft_8k.py on a 360M-class model (the shape of SmolLM2 360M), for comparing recipes on one GPU.

    python -m llama_jax.export --config=configs/sft_360m.py --dtype=bfloat16 --out=models/sft_360m
    python -m llama_jax.main --config=configs/sft_360m.py --config.model.init_from=models/sft_360m

The first command writes weights drawn with the seed as a Hugging Face folder; a checkpoint of that shape can stand in
its place. Without model.init_from the weights are drawn at the start. 361,821,120 parameters, embedding included once.
"""

from llama_jax.config import default

ROWS, CONTEXT = 128, 8192


def get_config():
    config = default()
    config.name = "sft_360m"
    config.model.vocab_size = 49152
    config.model.context = CONTEXT
    config.model.layers = 32
    config.model.width = 960
    config.model.heads = 15  # head size 960 / 15 = 64
    config.model.kv_heads = 5
    config.model.ffn = 2560
    config.model.rope_theta = 100000.0
    config.model.head_chunk_rows = 8192
    config.model.remat = True
    config.training.targets_per_parameter = None
    config.training.total_updates = 20
    config.training.epoch_targets_per_parameter = 100_000.0  # one virtual epoch, so that no update is short
    config.training.batch_targets = ROWS * (CONTEXT - 1)
    config.training.microbatch = 1
    config.optimizer.lr = 1e-5
    config.optimizer.beta1 = 0.9
    config.optimizer.beta2 = 0.95
    config.optimizer.weight_decay = 0.1
    config.optimizer.clip_norm = 1.0
    config.lr_schedule.warmup_steps = None
    config.lr_schedule.warmup_fraction = 0.1
    config.lr_schedule.min_lr_ratio = 0.1  # 1e-6
    config.data.source = "rows"
    config.data.path = "data/sft_rows"
    config.log.every_updates = 1
    return config
