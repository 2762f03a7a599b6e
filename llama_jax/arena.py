"""Named parameters of N workers as rows of one float32 array: layout, views, packing.

Letters: N workers, P padded length of a row. Matrices lie first and norm scales last, so that "does weight decay apply"
is a comparison of an index; zero padding fills a row to a multiple of ALIGNMENT elements.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from llama_jax import flops

MOST_PARTS = 112  # matrices of one concatenation: 16 layers of 7, whose gradients are about 64 arrays
ALIGNMENT = 1024  # elements: rows start on 4 KiB and can be split evenly over devices


class Slot(NamedTuple):
    """Place of one tensor in a row, in elements."""

    name: str
    offset: int
    shape: tuple[int, ...]
    decay: bool

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class Layout(NamedTuple):
    """Places of all tensors. used: elements before the padding; decayed: the first so many have weight decay."""

    slots: tuple[Slot, ...]
    decayed: int
    used: int
    padded: int

    def describe(self) -> list[dict[str, Any]]:
        """The layout as JSON, for checkpoints."""
        return [{**slot._asdict(), "shape": list(slot.shape)} for slot in self.slots]


def make_layout(model: Any) -> Layout:
    """The layout of a model: matrices in model order, then norm scales in model order."""
    shapes = flops.parameter_shapes(model)
    slots, offset = [], 0
    for matrices in (True, False):
        for name, shape in shapes.items():
            if (len(shape) > 1) == matrices:
                slots.append(Slot(name, offset, shape, decay=matrices))
                offset += math.prod(shape)
    decayed = sum(slot.size for slot in slots if slot.decay)
    return Layout(tuple(slots), decayed, offset, -(-offset // ALIGNMENT) * ALIGNMENT)


def blocks(layout: Layout) -> dict[str, tuple[int, int]]:
    """(offset, size) of the embedding, each layer's matrices, an untied head, and all norm scales."""
    found: dict[str, tuple[int, int]] = {}
    for slot in layout.slots:
        parts = slot.name.removeprefix("model.").split(".")
        name = ".".join(parts[: 2 if parts[0] == "layers" else 1]) if slot.decay else "norm_scales"
        offset, size = found.get(name, (slot.offset, 0))
        found[name] = (offset, size + slot.size)
    return found


def views(arena_NP: jax.Array, layout: Layout) -> dict[str, jax.Array]:
    """The tensors of all rows, {name: [N, *shape]}. Differentiate with respect to these, not through the slices."""
    rows = arena_NP.shape[0]
    return {
        slot.name: arena_NP[:, slot.offset : slot.offset + slot.size].reshape(rows, *slot.shape)
        for slot in layout.slots
    }


def pack(tensors: dict[str, jax.Array], layout: Layout) -> jax.Array:
    """Rows [N, P] of tensors {name: [N, *shape]}, padding zero.

    XLA fuses the concatenation into what reads it as long as it has few parts. So the norm scales are joined before,
    and so are neighbouring matrices where there are many.
    """
    first = tensors[layout.slots[0].name]
    flat = {slot: tensors[slot.name].reshape(first.shape[0], slot.size) for slot in layout.slots}
    matrices = [flat[slot] for slot in layout.slots if slot.decay]
    scales = [flat[slot] for slot in layout.slots if not slot.decay]
    scales.append(jnp.zeros((first.shape[0], layout.padded - layout.used), first.dtype))
    length = -(-len(matrices) // MOST_PARTS)
    groups = [matrices[i : i + length] for i in range(0, len(matrices), length)]
    return jnp.concatenate([_join(group) for group in [*groups, scales]], axis=1)


def _join(parts: list[jax.Array]) -> jax.Array:
    """One array of its own in memory: without the barrier XLA would make one concatenation of all."""
    if len(parts) == 1:
        return parts[0]
    return jax.lax.optimization_barrier(jnp.concatenate(parts, axis=1))


def to_row(params: dict[str, np.ndarray], layout: Layout) -> np.ndarray:
    """One row [P], float32, of named parameters.

    Raises ValueError on missing, extra, wrong-shape or non-float32 tensors: nothing is cast or broadcast.
    """
    differing = params.keys() ^ {slot.name for slot in layout.slots}
    if differing:
        raise ValueError(f"parameter names differ: {', '.join(sorted(differing)[:4])}")
    row = np.zeros(layout.padded, np.float32)
    for slot in layout.slots:
        tensor = params[slot.name]
        if tensor.shape != slot.shape or tensor.dtype != np.float32:
            raise ValueError(f"{slot.name} is {tensor.dtype}{list(tensor.shape)}, expected float32{list(slot.shape)}")
        row[slot.offset : slot.offset + slot.size] = tensor.reshape(-1)
    return row


def from_row(row_P: np.ndarray, layout: Layout) -> dict[str, np.ndarray]:
    """Named parameters of one row [P]."""
    return {slot.name: row_P[slot.offset : slot.offset + slot.size].reshape(slot.shape) for slot in layout.slots}
