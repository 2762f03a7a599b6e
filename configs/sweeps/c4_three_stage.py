"""The archived campaign on English C4: 20M, 50M and 90M models, twelve runs of one seed.

    python scripts/sweep.py --sweep=configs/sweeps/c4_three_stage.py --out=runs/sweeps/c4_three_stage

20M: six pairs of learning rate and decay. 50M: the best two with two values of beta2. 90M: the best two of these.
All runs: 20 targets per parameter, 32,768 targets an update, warm-up over 5 % of the budget, cosine to 10 %, beta1 0.9,
clip 1.0, seed 42. The loss of the last checkpoint on the full validation split promotes; exact ties go to the lower
learning rate, then decay, then beta2. One seed: that shows no robustness over seeds.
"""


def get_sweep():
    return {
        "name": "c4_three_stage",
        "seeds": [42],
        "settings": {
            "training.batch_targets": 32 * 1024,
            "training.microbatch": 32,
            "lr_schedule.warmup_steps": None,
            "lr_schedule.warmup_fraction": 0.05,
            "lr_schedule.min_lr_ratio": 0.1,
            "optimizer.beta1": 0.9,
            "optimizer.clip_norm": 1.0,
        },
        "ties": ["optimizer.lr", "optimizer.weight_decay", "optimizer.beta2"],
        "stages": [
            {
                "name": "20m",
                "config": "configs/c4_20m.py",
                "settings": {"optimizer.beta2": 0.95},
                "grid": {"optimizer.lr": [3e-4, 1e-3, 3e-3], "optimizer.weight_decay": [0.0, 0.1]},
            },
            {"name": "50m", "config": "configs/c4_50m.py", "best": 2, "grid": {"optimizer.beta2": [0.95, 0.99]}},
            {"name": "90m", "config": "configs/c4_90m.py", "best": 2},
        ],
    }
