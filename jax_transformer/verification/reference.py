"""Models in files as a pair: ours, and as the reference `torch_reference` or `transformers`."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jax_transformer.config import (
    BOS_ID,
    EOS_ID,
    PAD_ID,
    UNK_ID,
    DecoderOnlyConfig,
    EncoderDecoderConfig,
    EncoderOnlyConfig,
    ModelConfig,
)
from jax_transformer.errors import InputError
from jax_transformer.models.parameters import flatten
from jax_transformer.porting.families.base import Config
from jax_transformer.porting.families.transformer import RULES
from jax_transformer.porting.formats.base import Checkpoint
from jax_transformer.porting.generation import rules_of as rules_of_files
from jax_transformer.porting.identify import OWN, identify
from jax_transformer.porting.plan import Plan, convert_back, make_plan, run, unwrap
from jax_transformer.porting.pretrained import Pretrained, from_pretrained
from jax_transformer.porting.recognise import open_checkpoint
from jax_transformer.porting.rules import Alias, Rule
from jax_transformer.verification.capture import as_numpy
from jax_transformer.verification.decoding.hugging_face import cached_transformers
from jax_transformer.verification.decoding.task import Decoding
from jax_transformer.verification.decoding.ways import OURS, REFERENCE, beginning_with, row_by_row
from jax_transformer.verification.face import carrier
from jax_transformer.verification.hugging_face import given_inputs, with_transformers
from jax_transformer.verification.inputs import (
    DECODED,
    ROWS,
    Arrays,
    check_kind,
    revealing_inputs,
    revealing_prompts,
    revealing_source,
    training_batches,
)
from jax_transformer.verification.pair import Pair, call, encoded
from jax_transformer.verification.training.recipe import Recipe, Training


def load_pair(
    ours: Path,
    reference: Path,
    *,
    steps: int = 0,
    recipe: Recipe | None = None,
    decode: bool = False,
) -> Pair:
    """Both models, with inputs that reveal.

    Args:
        ours: what `from_pretrained` reads.
        reference: the other model.
        steps: of training; 0: none.
        recipe: of the training.
        decode: whether prompts are to be continued.

    Raises:
        InputError: files that cannot be read, or models of two kinds.
    """
    model = from_pretrained(ours, "float32")
    checkpoint = open_checkpoint(reference)
    if checkpoint.format == "huggingface":
        (pair, configs), draw = with_transformers(model, checkpoint), given_inputs
    else:
        (pair, configs), draw = with_torch_reference(model, checkpoint), revealing_inputs
    if steps:
        unused = untrained_ids(pair.theirs)
        batches = training_batches(*configs, steps=steps, unused=unused, draw=draw)
        training = Training(batches=batches, recipe=recipe or Recipe())
        pair = dataclasses.replace(pair, training=training)
    if decode:
        decoding = decoding_of(model, checkpoint, pair, configs, draw)
        pair = dataclasses.replace(pair, decoding=decoding)
    return pair


def decoding_of(
    model: Pretrained,
    checkpoint: Checkpoint,
    pair: Pair,
    configs: list[Config],
    draw: Callable[..., tuple[Arrays, np.ndarray]],
) -> Decoding:
    """What both sides are to continue: the reference begins as its own files say.

    Args:
        model: ours.
        checkpoint: of the reference.
        pair: of both.
        configs: of both.
        draw: makes inputs.

    Raises:
        InputError: what is said of generating cannot be followed, or an encoder alone.
    """
    if isinstance(model.config, EncoderOnlyConfig):
        raise InputError("encoders alone decode nothing: leave out the decoding")
    language = isinstance(model.config, DecoderOnlyConfig)
    theirs = {REFERENCE: row_by_row(pair.torch_call)}
    if checkpoint.format == "huggingface":
        theirs[f"{REFERENCE}, cached"] = cached_transformers
    if language:
        prompts, count = revealing_prompts(*configs)
        return Decoding(prompts=prompts, count=count, ours=OURS, theirs=theirs)
    start_id, their_start = model.rules.start_id, None
    if checkpoint.format in (OWN, "huggingface"):
        their_start = rules_of_files(identify(checkpoint)).start_id
    start_id = BOS_ID if start_id is None else start_id
    if their_start is not None:
        theirs = {name: beginning_with(their_start, way) for name, way in theirs.items()}
    return Decoding(
        prompts=((start_id,),) * ROWS,
        count=min(DECODED, *(config.max_len for config in configs)),
        ours=OURS,
        theirs=theirs,
        source=revealing_source(*configs, draw=draw),
        start_ids=(PAD_ID, UNK_ID, BOS_ID, EOS_ID),
    )


def untrained_ids(model: Any) -> set[int]:
    """Those whose rows an embedding of PyTorch keeps as they are (`padding_idx`), as no token of a
    text has them."""
    found = (getattr(module, "padding_idx", None) for module in model.modules())
    return {index for index in found if index is not None}


def with_torch_reference(model: Pretrained, checkpoint: Checkpoint) -> tuple[Pair, list[Config]]:
    """The pair with a model of `torch_reference`, and the configs of both.

    Raises:
        InputError: a file that holds none, or one of another kind.
    """
    reference = checkpoint.path
    config = model.config
    if checkpoint.format == OWN:
        other = from_pretrained(reference, "float32")
        config = other.config
        check_kind(model.config, config, reference)
        leaves = flatten(other.params) | flatten(other.buffers)
        theirs = reference_model(config)
        carry_into(theirs, {name: np.asarray(leaf) for name, leaf in leaves.items()}, reference)
    elif checkpoint.format in ("pt", "safetensors"):
        theirs = reference_model(config)
        load_tensors(theirs, checkpoint)
    else:
        raise InputError(
            f"{reference} in the format {checkpoint.format} is no reference: give a .pt, a run, a "
            f"ported directory or a Hugging Face folder"
        )
    configs = [model.config, config]
    inputs, valid = revealing_inputs(*configs)
    reading = encoded if isinstance(config, EncoderOnlyConfig) else call
    plan = plan_of(theirs)
    tensors = {name: as_numpy(tensor) for name, tensor in named_parameters(theirs).items()}
    pair = Pair(
        ours=model.model,
        theirs=theirs,
        inputs=inputs,
        rename=names_of_modules(theirs),
        their_weights=run(plan, tensors),
        jax_call=reading,
        torch_call=reading,
        valid=valid,
        carry=carrier(plan),
    )
    return pair, configs


def names_of_modules(model: Any) -> Callable[[str], str]:
    """From the modules of a `torch_reference` model to ours: two embeddings of one table are one
    module here, which both halves call."""
    halves = (getattr(model, half, None) for half in ("encoder", "decoder"))
    tables = [getattr(half.embedding, "weight", None) for half in halves if half is not None]
    if len(tables) < 2 or tables[0] is not tables[1]:
        return lambda name: name
    return lambda name: "decoder.embedding" if name == "encoder.embedding" else name


def reference_model(config: Config) -> Any:
    """The PyTorch model of that config, in evaluation mode.

    Raises:
        InputError: PyTorch or `torch_reference` is not installed.
    """
    try:
        from torch_reference import models
    except ImportError as error:
        raise InputError(f"the reference is a PyTorch model, and {error}: install it") from None
    if isinstance(config, ModelConfig):
        return models.Transformer.from_config(config).eval()
    if isinstance(config, EncoderDecoderConfig):
        return models.EncoderDecoder(config).eval()
    if isinstance(config, DecoderOnlyConfig):
        return models.DecoderOnly(config).eval()
    return models.EncoderOnly(config).eval()


def rules_of(model: Any) -> tuple[Rule | Alias, ...]:
    """The table of a `torch_reference` model: of a parameter with several names, the last one that
    is an embedding table's is carried."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    aliases = []
    for group in names.values():
        if len(group) > 1:
            kept = [name for name in group if name.endswith("embedding.weight")][-1]
            aliases += [Alias(name, kept) for name in group if name != kept]
    return (*aliases, *RULES)


def carry_into(model: Any, leaves: Mapping[str, np.ndarray], place: Path) -> None:
    """Give a `torch_reference` model the parameters of one of ours.

    Raises:
        InputError: they do not fit.
    """
    import torch

    rules, state = rules_of(model), model.state_dict()
    aliases = {rule.source for rule in rules if isinstance(rule, Alias)}
    shapes = {name: tuple(t.shape) for name, t in state.items() if name not in aliases}
    back = convert_back([r for r in rules if isinstance(r, Rule)], leaves, shapes)
    load_state(model, {name: torch.tensor(value) for name, value in back.items()}, place)


def load_tensors(model: Any, checkpoint: Checkpoint) -> None:
    """Read a file of a `torch_reference` model.

    Raises:
        InputError: tensors that do not fit.
    """
    import torch

    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    plain = unwrap([Rule(name, name) for name in wanted], checkpoint.tensors, wanted)
    tensors = {
        name: torch.tensor(np.array(checkpoint.tensors[of].read(), np.float32))
        for name, of in plain.items()
    }
    load_state(model, tensors, checkpoint.path)


def load_state(model: Any, tensors: dict[str, Any], place: Path) -> None:
    """`load_state_dict`, with one line for what does not fit; second names may be missing.

    Raises:
        InputError: a name too many or too few, or another shape.
    """
    state = model.state_dict()
    second = {rule.source for rule in rules_of(model) if isinstance(rule, Alias)}
    problems = [f"{name} has no place" for name in tensors if name not in state]
    for name, tensor in state.items():
        if name not in tensors:
            problems += [] if name in second else [f"{name} is missing"]
        elif tensors[name].shape != tensor.shape:
            found, wanted = list(tensors[name].shape), list(tensor.shape)
            problems.append(f"{name} is {found}, must be {wanted}")
    if problems:
        raise InputError(f"{place} is no model of this config: {'; '.join(problems[:5])}")
    model.load_state_dict(tensors, strict=False)


def plan_of(model: Any) -> Plan:
    """From the parameters of a `torch_reference` model to ours."""
    tensors = {name: as_numpy(tensor) for name, tensor in named_parameters(model).items()}
    return make_plan(rules_of(model), tensors, None)


def named_parameters(model: Any) -> dict[str, Any]:
    """Each under all of its names."""
    return dict(model.named_parameters(remove_duplicate=False))
