"""Records of recipes that ran on Megatron (slime, miles): their arguments, and the layout rules they must keep.

`config` of such a record holds the arguments of the command by name, without dashes in front, such as
{"tensor-model-parallel-size": 2}; one that isn't there has the default of Megatron, which for a parallel size is 1. A
change of an argument is structural where it only places or packs, and objective otherwise: component tests of their
swaps aren't made here.
"""

import re
from collections.abc import Mapping
from typing import Any

FRAMEWORKS = ("slime", "miles")
SIZES = {
    "TP": "tensor-model-parallel-size",
    "PP": "pipeline-model-parallel-size",
    "CP": "context-parallel-size",
    "EP": "expert-model-parallel-size",
    "ETP": "expert-tensor-parallel-size",
}
AUX_LOSS, MOST_TOKENS = "moe-aux-loss-coeff", "max-tokens-per-gpu"
AUX_LOSS_OFF = re.compile(r"qwen3\.[56]", re.IGNORECASE)  # models whose recipes train without the load-balancing loss
STRUCTURAL = (
    *SIZES.values(),
    MOST_TOKENS,
    "micro-batch-size",
    "recompute-granularity",
    "recompute-method",
    "recompute-num-layers",
    "sequence-parallel",
    "use-dynamic-batch-size",
    "use-distributed-optimizer",
    "overlap-grad-reduce",
    "overlap-param-gather",
)


def problem(config: Mapping[str, Any], model: str, gpus: int, rows: int, row_length: int) -> str | None:
    """Why the arguments can't be those of a recipe on so many GPUs, or None.

    A replica takes TP x PP x CP GPUs; the rows of a step divide by the replicas; GPUs / PP is a multiple of EP x ETP;
    CP GPUs hold at least a row. rows: of a step; row_length: in tokens.
    """
    size: dict[str, int] = {}
    for short, name in SIZES.items():
        size[short] = config.get(name, 1)
        if type(size[short]) is not int or size[short] < 1:
            return f"{name} is {config[name]!r}, not a number of GPUs"
    replica = size["TP"] * size["PP"] * size["CP"]
    if gpus % replica:
        return f"{gpus} GPUs are not whole replicas of TP x PP x CP = {replica}"
    if rows % (gpus // replica):
        return f"{rows} rows do not divide by DP = {gpus // replica}"
    experts = size["EP"] * size["ETP"]
    if gpus // size["PP"] % experts:
        return f"GPUs / PP = {gpus // size['PP']} is no multiple of EP x ETP = {experts}"
    most = config.get(MOST_TOKENS)
    if most is not None and (type(most) is not int or most * size["CP"] < row_length):
        return f"{MOST_TOKENS} {most!r} x CP {size['CP']} doesn't hold a row of {row_length} tokens"
    coefficient = config.get(AUX_LOSS, 0.0)
    if AUX_LOSS_OFF.search(model) and (type(coefficient) not in (int, float) or coefficient != 0):
        return f"{AUX_LOSS} {coefficient!r}: recipes of {model} train with 0"
    return None
