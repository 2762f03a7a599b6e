"""Headers of safetensors checkpoints made of layers in several number formats, and files that hold only headers."""

import json
import math

from llama_jax.hf_files import BITS, Tensor


class Header(dict):
    """{name: Tensor}, filled by adding matrices in one number format."""

    def matrix(self, name, out, width, form="bf16"):
        """A linear layer [out, width]: bf16, fp8 with scales per 128 x 128, or FP4 in the format of a family."""
        if form == "bf16":
            self[name + ".weight"] = Tensor("BF16", (out, width))
        elif form in ("fp8", "fp8_e8m0"):
            self[name + ".weight"] = Tensor("F8_E4M3", (out, width))
            blocks = (-(-out // 128), -(-width // 128))
            if form == "fp8":
                self[name + ".weight_scale_inv"] = Tensor("F32", blocks)
            else:
                self[name + ".scale"] = Tensor("F8_E8M0", blocks)
        elif form == "fp4":
            self[name + ".weight"] = Tensor("I8", (out, width // 2))
            self[name + ".scale"] = Tensor("F8_E8M0", (out, width // 32))
        elif form == "nvfp4":
            self[name + ".weight"] = Tensor("U8", (out, width // 2))
            self[name + ".weight_scale"] = Tensor("F8_E4M3", (out, width // 16))
            self[name + ".weight_scale_2"] = Tensor("F32", ())
            self[name + ".input_scale"] = Tensor("F32", ())
        else:
            raise ValueError(form)

    def vectors(self, dtype, size, *names):
        for name in names:
            self[name] = Tensor(dtype, (size,))

    @property
    def bytes(self):
        return sum(math.prod(shape) * BITS[dtype] for dtype, shape in self.values()) // 8


def heads(header, block, width, heads, kv_heads, size, bias=False, gated=False):
    """Grouped-query attention."""
    rows = {"q": heads * size * (1 + gated), "k": kv_heads * size, "v": kv_heads * size}
    for name, out in rows.items():
        header.matrix(f"{block}self_attn.{name}_proj", out, width)
        if bias:
            header.vectors("BF16", out, f"{block}self_attn.{name}_proj.bias")
    header.matrix(f"{block}self_attn.o_proj", width, heads * size)


def mlp(header, block, width, ffn, form="bf16"):
    for name, shape in {"gate_proj": (ffn, width), "up_proj": (ffn, width), "down_proj": (width, ffn)}.items():
        header.matrix(block + name, *shape, form)


def norms(header, block, width, *names):
    header.vectors("BF16", width, *(f"{block}{name}.weight" for name in names))


# Files.


def encode(tensors, metadata=True):
    """The 8 bytes and the header of a safetensors file that holds these tensors in this order, and the data's size."""
    content = {"__metadata__": {"format": "pt"}} if metadata else {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + math.prod(shape) * BITS[dtype] // 8
        content[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    raw = json.dumps(content, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw, end


def write(folder, config, tensors, shards=1):
    """A Hugging Face folder whose files end behind their headers; one file, or `shards` files with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        (folder / "model.safetensors").write_bytes(encode(tensors)[0])
        return folder
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensor for place, (name, tensor) in enumerate(tensors.items()) if place % shards == shard}
        weight_map |= dict.fromkeys(part, file)
        (folder / file).write_bytes(encode(part)[0])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder
