"""Greedy decoding against the uncached loop in PyTorch and a cached model of `transformers`.

The base model of Vaswani et al. 2017 (6+6 layers, D 512) with random weights, float32, the same
source sentences for all. No row ends early: our end token is outside the vocabulary, and
`MarianMTModel.generate` is given as many new tokens at least as at most. Then how our time grows
with the number of tokens.

    pip install -e '.[test,bench]' && python benchmarks/decode.py
"""

import argparse
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from timing import Timing, compare, print_table, print_timings
from transformers import MarianConfig, MarianMTModel

import torch_reference.models.encoder_decoder as reference
from jax_transformer.config import BOS_ID, PAD_ID, GenerationConfig, ModelConfig
from jax_transformer.decoding.greedy import decode
from jax_transformer.models.encoder_decoder import Transformer
from jax_transformer.models.parameters import split

NO_TOKEN = -1
ENDLESS = GenerationConfig(start_id=BOS_ID)


def base_model(vocab_size: int) -> ModelConfig:
    return ModelConfig(
        src_vocab_size=vocab_size,
        tgt_vocab_size=vocab_size,
        activation="relu",
        tied_tables="all",
        max_len=1024,
    )


def ours(config: ModelConfig, src: np.ndarray) -> Callable[[int], Callable[[], object]]:
    graphdef, params, buffers = split(Transformer.from_config(config, rngs=nnx.Rngs(0)))
    ids, mask = jnp.asarray(src), jnp.ones((src.shape[0], 1, 1, src.shape[1]), bool)

    def decoder(length: int) -> Callable[[], object]:
        return lambda: decode(
            graphdef, params, buffers, ids, mask, max_len=length, rules=ENDLESS
        ).block_until_ready()

    return decoder


def uncached(config: ModelConfig, src: np.ndarray, length: int) -> Callable[[], object]:
    model = reference.Transformer.from_config(config)
    ids = torch.from_numpy(src)
    return lambda: model.greedy_decode(ids, max_len=length, eos_idx=NO_TOKEN)


def marian(config: ModelConfig, src: np.ndarray, length: int) -> Callable[[], object]:
    model = MarianMTModel(
        MarianConfig(
            vocab_size=config.tgt_vocab_size,
            d_model=config.d_model,
            encoder_layers=config.num_encoder_layers,
            decoder_layers=config.num_decoder_layers,
            encoder_attention_heads=config.num_heads,
            decoder_attention_heads=config.num_heads,
            encoder_ffn_dim=config.d_ff,
            decoder_ffn_dim=config.d_ff,
            activation_function="relu",
            max_position_embeddings=config.max_len,
            pad_token_id=PAD_ID,
            eos_token_id=3,
            decoder_start_token_id=BOS_ID,
        )
    ).eval()
    ids = torch.from_numpy(src)
    return lambda: model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        num_beams=1,
        use_cache=True,
        max_new_tokens=length,
        min_new_tokens=length,
    )


PEERS = {"marian": marian, "uncached": uncached}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--tokens", type=int, default=64, help="tokens to decode")
    parser.add_argument("--long", type=int, default=512, help="tokens of the long decoding, or 0")
    parser.add_argument("--source", type=int, default=32, help="tokens of a source sentence")
    parser.add_argument("--vocab", type=int, default=8000)
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()

    config = base_model(arguments.vocab)
    short, long = f"{arguments.tokens} tokens", f"{arguments.long} tokens"
    for batch in arguments.batches:
        src = np.random.default_rng(0).integers(4, arguments.vocab, (batch, arguments.source))
        decoder = ours(config, src)
        contenders = {"ours": decoder(arguments.tokens)} | {
            name: PEERS[name](config, src, arguments.tokens) for name in arguments.peers
        }
        timings = compare(contenders, rounds=arguments.rounds, warmup=1)
        print_timings(f"Batch {batch}, {short}", timings)
        ratios = [
            (f"{name} / ours", *ratio(timings[name], timings["ours"])) for name in arguments.peers
        ]
        if arguments.long:
            growth = compare(
                {short: decoder(arguments.tokens), long: decoder(arguments.long)},
                rounds=arguments.rounds,
                warmup=1,
            )
            print_timings(f"Batch {batch}, ours", growth)
            ratios.append((f"ours, {long} / {short}", *ratio(growth[long], growth[short])))
        print_table(f"Batch {batch}, ratios of times", ("", "min", "median", "cpu"), ratios)


def ratio(slow: Timing, fast: Timing) -> list[str]:
    return [f"{a / b:.2f}" for a, b in zip(slow, fast, strict=True)]


if __name__ == "__main__":
    main()
