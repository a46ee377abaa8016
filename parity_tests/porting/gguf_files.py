"""GGUF files of small models, as llama.cpp's converter writes them."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from parity_tests.porting.checkpoints import SPECIAL, tokenizer

NAMES = {
    "lm_head": "output",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.layers": "blk",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def byte_level(writer: Any) -> None:
    """The tokenizer of other tests, as llama.cpp's converter writes it."""
    backend = json.loads(tokenizer().backend_tokenizer.to_str())
    vocabulary = sorted(backend["model"]["vocab"], key=backend["model"]["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(vocabulary)
    writer.add_token_types([3 if token in SPECIAL.values() else 1 for token in vocabulary])
    writer.add_token_merges([" ".join(merge) for merge in backend["model"]["merges"]])
    writer.add_pad_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)


WORDS = ("▁the", "▁cat", "▁mat", "he", "▁t", "▁c", "▁m", "at", "▁s", "in", "▁in", "▁▁", "sat")
"""Pieces from the most to the least likely: not the order of their lengths."""


def sentencepiece(writer: Any) -> None:
    """A vocabulary with the tokens of bytes that SentencePiece falls back on."""
    special = ["<unk>", "<s>", "</s>"]
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    letters = ["▁", *"aceghimnorst.?"]
    tokens = [*special, *pieces, *WORDS, *letters, "<user>"]
    kinds = [2, 3, 3] + [6] * 256 + [1] * (len(WORDS) + len(letters)) + [4]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(WORDS) + len(letters))] + [0.0]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_scores(scores)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of pairs half a head apart as neighbours (`LlamaModel.permute` of llama.cpp)."""
    parts = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return parts.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, model: Any, fill: Any = byte_level, **scaling: Any) -> Path:
    """The file that llama.cpp's converter would write of a small model."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    for name, value in scaling.items():
        getattr(writer, f"add_rope_scaling_{name}")(value)
    fill(writer)
    for name, tensor in model.state_dict().items():
        array = tensor.float().numpy()
        for heads, projection in ((config.num_attention_heads, "q"), (1, "k")):
            if f".{projection}_proj." in name:
                array = permuted(array, heads)
        for part, theirs in NAMES.items():
            name = name.replace(part, theirs)
        writer.add_tensor(name, array)
    if config.rope_parameters["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def llama3_factors(config: Any) -> np.ndarray:
    """`LlamaModel.generate_extra_tensors` of llama.cpp."""
    given = config.rope_parameters
    low, high = given["low_freq_factor"], given["high_freq_factor"]
    length, factors = given["original_max_position_embeddings"], []
    for exponent in range(0, config.head_dim, 2):
        wave = 2 * np.pi * given["rope_theta"] ** (exponent / config.head_dim)
        smooth = (length / wave - low) / (high - low)
        if wave < length / high:
            factors.append(1.0)
        elif wave > length / low:
            factors.append(given["factor"])
        else:
            factors.append(1 / ((1 - smooth) / given["factor"] + smooth))
    return np.array(factors, np.float32)
