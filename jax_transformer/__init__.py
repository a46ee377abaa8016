"""A Transformer library written twice, in JAX/Flax and in PyTorch."""

from typing import TYPE_CHECKING, Any

from jax_transformer.config import ModelConfig
from jax_transformer.errors import InputError

if TYPE_CHECKING:
    from jax_transformer.porting.pretrained import from_pretrained, save_pretrained

__all__ = ["InputError", "ModelConfig", "from_pretrained", "save_pretrained"]


def __getattr__(name: str) -> Any:
    """What takes long to import, when it is asked for."""
    if name in ("from_pretrained", "save_pretrained"):
        from jax_transformer.porting import pretrained

        return getattr(pretrained, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
