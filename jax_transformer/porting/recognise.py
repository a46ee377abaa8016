"""What a file or folder is: its format by its content, its family by its config or its names."""

import dataclasses
import importlib
from pathlib import Path

from jax_transformer.errors import InputError
from jax_transformer.porting.formats import gguf_file, huggingface, meta
from jax_transformer.porting.formats.base import Checkpoint, read_json, readable_errors
from jax_transformer.porting.formats.torch_file import LEGACY_MAGIC

READERS = {
    "gguf": "gguf_file",
    "huggingface": "huggingface",
    "meta": "meta",
    "orbax": "orbax_run",
    "pt": "torch_file",
    "safetensors": "safetensors_file",
}
"""Format -> the module that reads it."""

SIGNATURES = (
    ("transformer", "decoder.layers.0.cross_attn.q_proj.weight", "encoder.norm.weight"),
    (
        "gemma3_text",
        "layers.0.self_attn.q_norm.weight",
        "layers.0.pre_feedforward_layernorm.weight",
    ),
    ("gemma2", "layers.0.pre_feedforward_layernorm.weight"),
    ("olmo2", "layers.0.self_attn.q_norm.weight", "layers.0.post_feedforward_layernorm.weight"),
    ("qwen3", "layers.0.self_attn.q_norm.weight", "layers.0.mlp.gate_proj.weight"),
    ("qwen2", "layers.0.self_attn.q_proj.bias", "layers.0.mlp.gate_proj.weight"),
    ("phi3", "layers.0.self_attn.qkv_proj.weight", "layers.0.mlp.gate_up_proj.weight"),
    ("llama", "layers.0.self_attn.q_proj.weight", "layers.0.mlp.gate_proj.weight"),
    ("llama", "layers.0.attention.wq.weight", "layers.0.feed_forward.w1.weight"),
    ("llama", "blk.0.attn_q.weight", "blk.0.ffn_gate.weight"),
    ("gptj", "h.0.attn.q_proj.weight", "h.0.mlp.fc_in.weight"),
    ("gpt2", "h.0.attn.c_attn.weight"),
    ("gpt_neox", "layers.0.attention.query_key_value.weight"),
    ("bloom", "word_embeddings_layernorm.weight", "h.0.self_attention.query_key_value.weight"),
    ("mpt", "blocks.0.attn.Wqkv.weight"),
    ("roberta", "roberta.embeddings.position_embeddings.weight"),
    ("bert", "encoder.layer.0.attention.self.query.weight"),
    ("t5", "encoder.block.0.layer.0.SelfAttention.q.weight"),
    ("whisper", "encoder.conv1.weight", "decoder.embed_positions.weight"),
    ("bart", "encoder.layernorm_embedding.weight"),
    ("marian", "encoder.layers.0.self_attn.q_proj.weight", "final_logits_bias"),
)
"""Family, and how names of its tensors end; the first of which all are there is taken. Files
without a config cannot tell apart what differs in numbers only: Mistral passes for Llama."""


@dataclasses.dataclass(frozen=True)
class Recognised:
    """What a file or folder seems to be."""

    format: str
    family: str | None


def recognise(path: Path) -> Recognised:
    """Format and family; the family is None where nothing says it.

    Raises:
        InputError: no format that is known, or files that cannot be read.
    """
    checkpoint = open_checkpoint(path)
    return Recognised(checkpoint.format, family_of(checkpoint))


def open_checkpoint(path: Path, format: str | None = None, *, latest: bool = False) -> Checkpoint:
    """The headers of all tensors, and what describes the model.

    A file of tensors in a folder with a `config.json` has that config.

    Args:
        path: a file or folder.
        format: one of `READERS`; by default the one that it looks like.
        latest: of a run, what training goes on from, not the best model.

    Raises:
        InputError: no format that is known, or files that are not as it has them.
    """
    format = format or format_of(path)
    # Orbax takes seconds to import.
    module = importlib.import_module(f"jax_transformer.porting.formats.{READERS[format]}")
    if format == "safetensors" and path.is_dir():
        path = path / next(n for n in weights_of(path) if n.startswith(huggingface.SAFETENSORS))
    options = {"latest": latest} if format == "orbax" else {}
    checkpoint: Checkpoint = module.read(path, **options)
    config = path.parent / huggingface.CONFIG
    if format in ("pt", "safetensors") and config.is_file():
        return dataclasses.replace(
            checkpoint, config=read_json(config), companions=huggingface.companions(path.parent)
        )
    return checkpoint


def format_of(path: Path) -> str:
    """The format that a file or folder looks like.

    Raises:
        InputError: none.
    """
    if path.is_dir():
        return format_of_folder(path)
    if path.suffix == ".json" and path.name.endswith(".index.json"):
        return "safetensors"
    with readable_errors(path), path.open("rb") as file:
        start = file.read(max(9, len(LEGACY_MAGIC)))
    if start.startswith(gguf_file.MAGIC):
        return "gguf"
    if start.startswith((b"PK\x03\x04", LEGACY_MAGIC)):
        return "pt"
    if len(start) >= 9 and start[8:9] == b"{":
        return "safetensors"
    raise InputError(
        f"{path} begins like no file of safetensors, PyTorch or GGUF: see that it is a checkpoint "
        f"and whole"
    )


def format_of_folder(path: Path) -> str:
    """The format that a folder looks like.

    Raises:
        InputError: none.
    """
    with readable_errors(path):
        names = {entry.name for entry in path.iterdir()}
    if meta.PARAMS in names and any(name.startswith("consolidated") for name in names):
        return "meta"
    if "checkpoints" in names:
        return "orbax"
    if huggingface.CONFIG in names:
        return "huggingface"
    if any(name.startswith(huggingface.SAFETENSORS) for name in weights_of(path)):
        return "safetensors"
    raise InputError(
        f"{path} is no folder of a model: it has no {huggingface.CONFIG} with weights beside it, "
        f"no {meta.PARAMS} with consolidated.00.pth, and no checkpoints/ of a run"
    )


def weights_of(path: Path) -> list[str]:
    """The index, else the file, of the safetensors in a folder."""
    names = (f"{huggingface.SAFETENSORS}.index.json", huggingface.SAFETENSORS)
    return [name for name in names if (path / name).is_file()]


def family_of(checkpoint: Checkpoint) -> str | None:
    """The family that the config names, else the one whose names the tensors have."""
    config = checkpoint.config
    stated = {
        "gguf": config.get("general.architecture"),
        "meta": "llama",
        "orbax": config.get("family", "transformer"),
    }.get(checkpoint.format, config.get("model_type"))
    if isinstance(stated, str):
        return stated
    names = tuple(checkpoint.tensors)
    for family, *endings in SIGNATURES:
        if all(any(name.endswith(ending) for name in names) for ending in endings):
            return family
    return None
