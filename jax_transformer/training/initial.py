"""What a run does not make anew: the model that it begins with (`--init-from`), or its own."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jax_transformer.config import (
    BOS_ID,
    EOS_ID,
    OWN_RULES,
    DecoderOnlyConfig,
    EncoderDecoderConfig,
    EncoderOnlyConfig,
    GenerationConfig,
)
from jax_transformer.data.packing import OWN_ENDS, Ends
from jax_transformer.errors import InputError
from jax_transformer.porting.formats.base import MANIFEST
from jax_transformer.porting.formats.orbax_run import SOURCE
from jax_transformer.porting.generation import PART, generation_values, is_own, translated
from jax_transformer.porting.identify import Identified, identify
from jax_transformer.porting.pretrained import Pretrained, from_pretrained, named
from jax_transformer.porting.recognise import open_checkpoint
from jax_transformer.porting.text import AnyTokenizer, PretrainedTokenizer
from jax_transformer.porting.vocabulary import check_vocabulary
from jax_transformer.training.run import FAMILY, AnyModelConfig, RunDirectory
from jax_transformer.training.settings import RunConfig, read_json


@dataclasses.dataclass(frozen=True, kw_only=True)
class Given:
    """Model and tokenizer of a run that does not make them.

    Attributes:
        generation: what the files of a model that was made elsewhere say of its texts; None: the
            tokenizer is one of ours.
    """

    model_config: AnyModelConfig
    tokenizer: AnyTokenizer
    generation: Mapping[str, Any] | None

    @property
    def rules(self) -> GenerationConfig:
        """What texts begin and end with.

        Raises:
            InputError: as `porting.generation.translated`.
        """
        if self.generation is None:
            return OWN_RULES
        encoder = not isinstance(self.model_config, DecoderOnlyConfig)
        return translated(dict(self.generation), encoder=encoder)

    @property
    def end_id(self) -> int:
        """What ends a text.

        Raises:
            InputError: nothing says it.
        """
        if not self.rules.end_ids:
            raise InputError(
                "nothing says which token ends a text: add eos_token_id to the model's "
                "generation_config.json"
            )
        return self.rules.end_ids[0]

    def around_documents(self) -> Ends:
        """The tokens around a document of a language model: first the one that the tokenizer puts
        before a text, else the model's first token, else the end of the document before.

        Raises:
            InputError: nothing says the last, or the tokenizer puts several before a text.
        """
        if self.generation is None:
            return OWN_ENDS
        assert isinstance(self.tokenizer, PretrainedTokenizer)
        first = before(self.tokenizer)
        if len(first) > 1:
            raise InputError(f"the tokenizer puts the tokens {first} before a text: must be one")
        start = first[0] if first else self.generation.get("bos_token_id", self.end_id)
        return Ends(start, self.end_id)

    def around_sentences(self) -> tuple[int, int | None]:
        """What a decoder begins with, and what is put after a sentence: None where the tokenizer
        does that.

        Raises:
            InputError: nothing says them.
        """
        if self.generation is None:
            return BOS_ID, EOS_ID
        start, ids = self.rules.start_id, self.tokenizer.encode("a")
        assert start is not None
        return start, None if ids and ids[-1] in self.rules.end_ids else self.end_id


def before(tokenizer: PretrainedTokenizer) -> list[int]:
    """The special tokens that a tokenizer puts before a text."""
    bare, full = tokenizer.bare().encode("a"), tokenizer.encode("a")
    places = range(len(full) - len(bare) + 1)
    return next((full[:n] for n in places if full[n : n + len(bare)] == bare), [])


def given(config: RunConfig, run: RunDirectory, initial: Pretrained | None) -> Given | None:
    """What the run to resume, or the model to begin with, says; None: all is made anew.

    Raises:
        InputError: no tokenizer, or files that do not fit each other.
    """
    if config.resume is not None:
        model = run.load_model_config()
        part = read_json(run.config).get(PART)
        return Given(model_config=model, tokenizer=run.load_tokenizer(model), generation=part)
    if initial is None:
        return None
    path, model = config.init_from, initial.config
    assert not isinstance(model, EncoderOnlyConfig)
    if initial.tokenizer is None:
        raise InputError(
            f"--init-from {path}: it has no tokenizer.json: copy the tokenizer of the model there"
        )
    check_vocabulary(initial.source)
    part = None if is_own(initial.source) else generation_values(initial.source)
    found = Given(model_config=model, tokenizer=initial.tokenizer, generation=part)
    with named(initial.source.checkpoint.path):
        found.around_documents() if config.task == "language" else found.around_sentences()
    return found


def load_initial(config: RunConfig) -> Pretrained | None:
    """The model of `init_from`, in float32; None where the run begins with a new one.

    Raises:
        InputError: it cannot be read, or is no model that this task trains; an optimizer that is
            not there or has other settings.
    """
    path = config.init_from
    if path is None:
        return None
    check_kind(config, identify(open_checkpoint(path, latest=config.init_optimizer)))
    model = from_pretrained(path, jnp.float32, with_optimizer=config.init_optimizer)
    if model.optimizer is not None:
        check_optimizer(config, model)
    return model


def check_kind(config: RunConfig, source: Identified) -> None:
    """Refuse a model that the task does not train.

    Raises:
        InputError: what would train it, if anything does.
    """
    path, model = config.init_from, source.config
    if isinstance(model, EncoderOnlyConfig):
        raise InputError(
            f"--init-from {path}: {source.family.name} is an encoder, which neither continues nor "
            f"translates text: give a decoder or an encoder-decoder"
        )
    if isinstance(model, EncoderDecoderConfig) and model.src_vocab_size is None:
        raise InputError(
            f"--init-from {path}: {source.family.name} reads sound, for which there is no training "
            f"here: give a model of text"
        )
    task = "language" if isinstance(model, DecoderOnlyConfig) else "translation"
    if task != config.task:
        kind, command = {
            "language": ("a language model", "train.py lm"),
            "translation": ("an encoder-decoder", "train.py"),
        }[task]
        raise InputError(
            f"--init-from {path}: {source.family.name} is {kind}: train it with python {command} "
            f"--init-from {path}"
        )


def check_optimizer(config: RunConfig, model: Pretrained) -> None:
    """Refuse an optimizer that is not the one which the run would go on with.

    Raises:
        InputError: a hyperparameter differs, or it has made all steps already.
    """
    assert model.optimizer is not None
    for name in ("b1", "b2", "eps", "weight_decay"):
        found = getattr(model.optimizer.settings, name)
        if found != (told := getattr(config.optimizer, name)):
            raise InputError(
                f"--init-optimizer: the optimizer of {config.init_from} has {name}={found}, this "
                f"run {told}: give --optimizer.{name.replace('_', '-')} {found}"
            )
    if model.optimizer.updates >= config.steps:
        raise InputError(
            f"--init-optimizer: the model has had {model.optimizer.updates:,} updates already, but "
            f"steps={config.steps}: say how far to train with --steps"
        )


def brought_along(model: Pretrained | None) -> tuple[dict[str, Any], dict[str, bytes]]:
    """What a run keeps of a model that was made elsewhere: values of its `config.json`, and files
    by name, with which it is ported back."""
    if model is None or is_own(model.source):
        return {}, {}
    source = model.source
    values = {FAMILY: source.family.name, PART: generation_values(source)}
    files = {file.name: file.read_bytes() for file in source.checkpoint.companions}
    files |= {f"{SOURCE}/{name}": path.read_bytes() for name, path in source.originals.items()}
    if source.names is not None:
        names = {name: list(shape) for name, shape in source.names.items()}
        files[MANIFEST] = json.dumps({"names": names}, indent=2).encode()
    return values, files


def kept(run: RunDirectory) -> dict[str, Any]:
    """The values of `brought_along` in the `config.json` of a run to resume."""
    values = read_json(run.config)
    return {name: values[name] for name in (FAMILY, PART) if name in values}
