"""What a model is: plain Python that imports neither framework, shared by both."""

from jax_transformer.config.audio import AudioConfig
from jax_transformer.config.checks import check_choice, check_positive, from_dict
from jax_transformer.config.generation import OWN_RULES, GenerationConfig
from jax_transformer.config.ids import BOS_ID, EOS_ID, IGNORED_LABEL, PAD_ID, UNK_ID
from jax_transformer.config.language import (
    DecoderOnlyConfig,
    EncoderDecoderConfig,
    EncoderOnlyConfig,
    Position,
)
from jax_transformer.config.layers import (
    Activation,
    LayerConfig,
    Norm,
    Placement,
    QueryKeyNorm,
)
from jax_transformer.config.rotary import RotaryConfig, RotaryPairing, RotaryScaling
from jax_transformer.config.translation import (
    Architecture,
    ModelConfig,
    NormPlacement,
    PositionEncoding,
    TiedTables,
)

__all__ = [
    "BOS_ID",
    "EOS_ID",
    "IGNORED_LABEL",
    "OWN_RULES",
    "PAD_ID",
    "UNK_ID",
    "Activation",
    "Architecture",
    "AudioConfig",
    "DecoderOnlyConfig",
    "EncoderDecoderConfig",
    "EncoderOnlyConfig",
    "GenerationConfig",
    "LayerConfig",
    "ModelConfig",
    "Norm",
    "NormPlacement",
    "Placement",
    "Position",
    "PositionEncoding",
    "QueryKeyNorm",
    "RotaryConfig",
    "RotaryPairing",
    "RotaryScaling",
    "TiedTables",
    "check_choice",
    "check_positive",
    "from_dict",
]
