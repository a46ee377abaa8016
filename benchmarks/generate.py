"""Cached greedy generation against `transformers`' `generate`, at the size of SmolLM2-135M.

Random weights, float32, the same prompts for both. No row ends early: our model has no end token,
and `LlamaForCausalLM.generate` is given as many new tokens at least as at most. At one row the
parameters are read once a token, and the time is that of reading them: the fraction of the
machine's read bandwidth says how near to that it is.

    pip install -e '.[test,bench]' && python benchmarks/generate.py
"""

import argparse
from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from timing import compare, print_table, print_timings, timed
from transformers import LlamaConfig, LlamaForCausalLM

from jax_transformer.config import DecoderOnlyConfig
from jax_transformer.config.presets import preset
from jax_transformer.data.tokenizer import Tokenizer
from jax_transformer.decoding.generate import TextGenerator
from jax_transformer.decoding.prompts import prompt_batches
from jax_transformer.models.decoder_only import DecoderOnly
from jax_transformer.models.parameters import split


def ours(config: DecoderOnlyConfig, prompts: np.ndarray, tokens: int) -> Callable[[], object]:
    model = split(DecoderOnly(config, rngs=nnx.Rngs(0)))
    codec = cast(Tokenizer, None)  # tokens in, tokens out
    generator = TextGenerator(*model, config, codec)
    (batch,) = prompt_batches(prompts.tolist(), len(prompts))
    return lambda: np.stack(list(generator.tokens(batch, tokens)), axis=1)


def theirs(config: DecoderOnlyConfig, prompts: np.ndarray, tokens: int) -> Callable[[], object]:
    layer = config.layer
    assert layer.rotary is not None
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=layer.d_model,
            intermediate_size=layer.d_ff,
            num_hidden_layers=config.num_layers,
            num_attention_heads=layer.num_heads,
            num_key_value_heads=layer.num_kv_heads,
            max_position_embeddings=config.max_len,
            rope_parameters={"rope_type": "default", "rope_theta": layer.rotary.base},
            tie_word_embeddings=config.tied,
            pad_token_id=0,
            eos_token_id=2,
        )
    ).eval()
    ids = torch.from_numpy(prompts)
    return lambda: model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        num_beams=1,
        use_cache=True,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
    )


def read_bandwidth(gigabytes: float = 1.0, rounds: int = 7) -> float:
    """Bytes a second at which a sum reads an array that no cache holds."""
    array = jnp.ones(int(gigabytes * 1e9 / 4), jnp.float32)
    total = jax.jit(jnp.sum)
    total(array).block_until_ready()
    return array.nbytes / min(
        timed(lambda: total(array).block_until_ready())[1] for _ in range(rounds)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="smollm2-135m", help="a Llama among the presets")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--prompt", type=int, default=16, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()

    config = cast(DecoderOnlyConfig, preset(arguments.preset))
    bandwidth = read_bandwidth()
    print(f"A sum reads {1e-9 * bandwidth:.1f} GB/s")
    for batch in arguments.batches:
        shape = batch, arguments.prompt
        prompts = np.random.default_rng(0).integers(4, config.vocab_size, shape)
        calls = {
            "ours": ours(config, prompts, arguments.tokens),
            "transformers": theirs(config, prompts, arguments.tokens),
        }
        timings = compare(calls, rounds=arguments.rounds, warmup=1)
        print_timings(f"Batch {batch}, {arguments.tokens} tokens", timings)
        count = batch * arguments.tokens
        rows = [
            (name, f"{count / timing.best:.0f}", f"{count / timing.median:.0f}")
            for name, timing in timings.items()
        ]
        best, median, cpu = (
            f"{slow / fast:.2f}"
            for slow, fast in zip(timings["transformers"], timings["ours"], strict=True)
        )
        rows.append(("ratio", best, median))
        print_table(f"Batch {batch}, tokens a second", ("", "best", "median"), rows)
        print(f"ratio of processor time {cpu}")
        if batch == 1:
            parameters = jax.eval_shape(lambda: split(DecoderOnly(config, rngs=nnx.Rngs(0)))[1])
            size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(parameters))
            used = size * count / timings["ours"].best
            print(f"parameters are read at {1e-9 * used:.1f} GB/s: {used / bandwidth:.0%} of a sum")


if __name__ == "__main__":
    main()
