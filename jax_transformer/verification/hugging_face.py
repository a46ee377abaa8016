"""A Hugging Face folder as the reference: the model that `transformers` makes of it."""

import inspect
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from jax_transformer.config import DecoderOnlyConfig, EncoderOnlyConfig
from jax_transformer.errors import InputError
from jax_transformer.models.parameters import flatten
from jax_transformer.porting.families.base import Config
from jax_transformer.porting.formats.base import Checkpoint
from jax_transformer.porting.identify import identify, leaf_shapes
from jax_transformer.porting.plan import make_plan
from jax_transformer.porting.pretrained import Pretrained
from jax_transformer.porting.stream import stream
from jax_transformer.verification.capture import as_numpy
from jax_transformer.verification.face import carrier, module_names
from jax_transformer.verification.inputs import ROWS, Arrays, check_kind, revealing_inputs
from jax_transformer.verification.pair import Pair, call, encoded

SEQUENCE = 160
"""Tokens of a row of an encoder-decoder, if its tables have as many positions: its first ones, as
`transformers` counts positions in these from the beginning of a row, padding or not."""


def with_transformers(model: Pretrained, checkpoint: Checkpoint) -> tuple[Pair, list[Config]]:
    """The pair with the model of a Hugging Face folder, and the configs of both.

    Raises:
        InputError: `transformers` is not installed or cannot load it, or a model of another kind.
    """
    source = identify(checkpoint)
    check_kind(model.config, source.config, checkpoint.path)
    theirs = load(source.config, checkpoint)
    configs = [model.config, source.config]
    inputs, valid = given_inputs(*configs)
    plan = source.plan()
    # A table of positions that is no parameter here is no module of its own.
    tables = {name.rpartition(".")[0] for name in flatten(model.buffers)}
    names = {one: two for one, two in module_names(plan).items() if two not in tables}
    tensors = {name: as_numpy(tensor) for name, tensor in theirs.state_dict().items()}
    in_memory = make_plan(source.table.rules(source.config), tensors, leaf_shapes(source.config))
    pair = Pair(
        ours=model.model,
        theirs=theirs,
        inputs=inputs,
        rename=names.get,
        their_weights=dict(stream(plan, checkpoint.tensors, np.dtype("float32"))),
        jax_call=encoded if isinstance(source.config, EncoderOnlyConfig) else call,
        torch_call=caller(source.config),
        valid=valid,
        carry=carrier(in_memory),
    )
    return pair, configs


def load(config: Config, checkpoint: Checkpoint) -> Any:
    """The model, in float32 and evaluation mode.

    Raises:
        InputError: `transformers` is not installed, or cannot load it.
    """
    try:
        import torch
        import transformers
    except ImportError as error:
        raise InputError(f"a Hugging Face folder is loaded by transformers: {error}") from None
    if isinstance(config, DecoderOnlyConfig):
        kind = transformers.AutoModelForCausalLM
    elif isinstance(config, EncoderOnlyConfig):
        kind = transformers.AutoModelForMaskedLM if config.token_head else transformers.AutoModel
    elif getattr(config, "audio", None) is not None:
        kind = transformers.AutoModelForSpeechSeq2Seq
    else:
        kind = transformers.AutoModelForSeq2SeqLM
    shown = transformers.logging.is_progress_bar_enabled()
    transformers.logging.disable_progress_bar()
    try:
        return kind.from_pretrained(
            checkpoint.path,
            dtype=torch.float32,
            attn_implementation="eager",
            local_files_only=True,
        ).eval()
    except (OSError, ValueError) as error:
        first = str(error).splitlines()[0]
        raise InputError(f"{checkpoint.path}: transformers cannot load it: {first}") from None
    finally:
        if shown:
            transformers.logging.enable_progress_bar()


def given_inputs(
    *configs: Config, rows: int = ROWS, seed: int = 0, unused: Collection[int] = ()
) -> tuple[Arrays, np.ndarray]:
    """`revealing_inputs`, as `transformers` can be given them: encoder-decoders have no say in
    positions, and read sound of one length only."""
    if isinstance(configs[0], DecoderOnlyConfig | EncoderOnlyConfig):
        return revealing_inputs(*configs, rows=rows, seed=seed, unused=unused)
    audio = getattr(configs[0], "audio", None)
    inputs, valid = revealing_inputs(
        *configs,
        rows=rows,
        seed=seed,
        unused=unused,
        length=SEQUENCE,
        frames=None if audio is None else 2 * audio.max_len,
    )
    return (*inputs[:4], None, None), valid


def caller(config: Config) -> Callable[..., Any]:
    """How the model is called with what our model is."""
    if isinstance(config, DecoderOnlyConfig):
        return call_decoder
    if isinstance(config, EncoderOnlyConfig):
        offset = config.position_offset
        return lambda model, *inputs: call_encoder(model, offset, *inputs)
    return call_speech if getattr(config, "audio", None) is not None else call_encoder_decoder


def call_decoder(model: Any, tokens: Any, mask: Any, positions: Any) -> Any:
    """Logits of a causal language model."""
    options = {}
    if "position_ids" in inspect.signature(model.forward).parameters:
        options["position_ids"] = positions.long()
    attention = mask[:, 0, 0].long()
    found = model(input_ids=tokens.long(), attention_mask=attention, use_cache=False, **options)
    return found.logits


def call_encoder(
    model: Any, offset: int, tokens: Any, mask: Any, token_types: Any, positions: Any
) -> Any:
    """Logits of masked tokens, or hidden states of a model that gives none."""
    found = model(
        input_ids=tokens.long(),
        attention_mask=mask[:, 0, 0].long(),
        token_type_ids=token_types.long(),
        position_ids=positions.long() + offset,
    )
    return found.logits if hasattr(found, "logits") else found.last_hidden_state


def call_encoder_decoder(
    model: Any, source: Any, target: Any, source_mask: Any, target_mask: Any, *positions: Any
) -> Any:
    """Logits of an encoder-decoder of texts."""
    del positions
    return model(
        input_ids=source.long(),
        attention_mask=source_mask[:, 0, 0].long(),
        decoder_input_ids=target.long(),
        decoder_attention_mask=target_mask[:, 0, -1].long(),
        use_cache=False,
    ).logits


def call_speech(
    model: Any, features: Any, target: Any, source_mask: Any, target_mask: Any, *positions: Any
) -> Any:
    """Logits of an encoder-decoder that reads sound, of which it sees all."""
    del source_mask, positions
    return model(
        input_features=features.transpose(1, 2),
        decoder_input_ids=target.long(),
        decoder_attention_mask=target_mask[:, 0, -1].long(),
        use_cache=False,
    ).logits
