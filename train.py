"""Train an encoder-decoder Transformer to translate: `python train.py --help`."""

from jax_transformer.cli import exit_on_bad_input
from jax_transformer.huge_pages import restart_with_huge_pages
from jax_transformer.training.config import parse

if __name__ == "__main__":
    with exit_on_bad_input():
        config = parse()
        restart_with_huge_pages()
        # Only now: `--help` and a wrong flag need no JAX.
        from jax_transformer.training.loop import train

        train(config)
