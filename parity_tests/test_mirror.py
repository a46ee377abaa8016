"""The two packages are each other's mirror: files, names, arguments, parameters and cases.

`differences` lists what one package has and the other lacks, under keys like
`jax layers.attention.MultiHeadAttention.forward(cache)`. Each must match a pattern of
`EXCEPTIONS`, with its reason, and each pattern must match a difference.
"""

import fnmatch
import importlib
import inspect
from pathlib import Path

import pytest

import jax_transformer
import torch_reference
from parity_tests.harness import REGISTRY

ROOTS = {
    "jax": Path(jax_transformer.__file__).parent,
    "torch": Path(torch_reference.__file__).parent,
}
TESTS = Path(__file__).parent

# In `training` the mirror holds what computes numbers; a run is only ever made with JAX.
MIRRORED = ("layers.*", "models.*", "training.loss", "training.schedule", "training.step")

EXCEPTIONS = {
    # Files.
    "jax layers.dropout": "PyTorch's own nn.Dropout keeps its random state itself",
    "jax layers.fusion": "what XLA's CPU compiler has to be told",
    "jax layers.stack": "layers under lax.scan: PyTorch has no compile time to save",
    "jax models.parameters": "models as trees; state_dict in PyTorch",
    # Names.
    "jax layers.attention.*_by_head": "what XLA's CPU compiler reads fastest",
    "jax layers.attention.cached_implementation": "the reference decodes without a cache",
    "jax layers.attention.softmax": "a derivative written out, as in PyTorch's kernel",
    "jax layers.attention.KeyValueStore": "the reference decodes without a cache",
    "jax layers.block.LayerStore": "the reference decodes without a cache",
    "jax layers.feedforward.gelu": "a derivative written out, as in PyTorch's kernel",
    "jax layers.feedforward.smooth": "a derivative written out, as in PyTorch's kernels",
    "jax layers.feedforward.activate_gated": "a derivative written out, to save fewer arrays",
    "jax layers.feedforward.value_and_slope": "what these derivatives compute",
    "jax layers.feedforward.normal_*": "what these derivatives compute",
    "jax layers.feedforward.widen": "PyTorch's kernels compute wide inside",
    "jax layers.linear.Linear": "nn.Linear",
    "jax layers.linear.*_bias": "parts of nn.Linear",
    "jax layers.linear.affine*": "derivatives written out, as in PyTorch's kernels",
    "jax layers.linear.Embedding": "nn.Embedding",
    "jax layers.linear.transpose_kernels": "what XLA's CPU compiler reads fastest",
    "jax layers.linear.table_rows": "nn.functional.embedding",
    "jax layers.linear.uniform": "an initialiser; nn.Linear has its own",
    "jax layers.normalization.layer_norm": "a derivative written out, as in PyTorch's kernel",
    "jax layers.normalization.rms_norm": "a derivative written out, to save fewer arrays",
    "jax layers.rotary.reduced_angles": "PyTorch multiplies in float64",
    "jax layers.rotary.high_word": "PyTorch multiplies in float64",
    "jax layers.position.Buffer": "register_buffer",
    "jax layers.position.add_rows": "a sum in float32; PyTorch's rounds once anyway",
    "jax training.schedule.noam_rate": "TransformerLRScheduler.rate",
    "jax training.schedule.*_schedule": "functions of the count, as optax has them",
    "torch training.schedule.*LRScheduler": "objects that count, as PyTorch has them",
    "jax training.step.TrainState": "PyTorch keeps state in the model and the optimiser",
    "jax training.step.start_state": "PyTorch keeps state in the model and the optimiser",
    "jax training.step.update_average": "of a run; PyTorch is trained only to be compared",
    "jax training.step.check_*": "checks of batches before JAX's compiled step",
    "jax training.step.make_train_step": "train_step, once it is compiled",
    "torch training.step.train_step": "what make_train_step gives",
    "jax training.step.language_loss(graphdef)": "a model in parts",
    "jax training.step.language_loss(params)": "a model in parts",
    "jax training.step.language_loss(buffers)": "a model in parts",
    "torch training.step.language_loss(model)": "a model in one",
    "torch training.step.adam*": "training.optimizer in JAX, where clipping is a part of it",
    "jax models.initialization.normal": "nn.init.normal_",
    # Methods.
    "jax models.decoder_only.DecoderOnly.step": "the reference decodes without a cache",
    "jax models.encoder_decoder.Decoder.step": "the reference decodes without a cache",
    "torch models.encoder_decoder.EncoderDecoder.greedy_decode": "decoding.greedy in JAX",
    # Arguments.
    "jax *(rngs)": "PyTorch draws from a global generator",
    "jax *(dropout_key)": "PyTorch draws from a global generator",
    "jax *(cache)": "the reference decodes without a cache",
    "torch *create_look_ahead_mask(device)": "JAX places arrays by itself",
    "jax layers.normalization.LayerNorm.__init__(epsilon)": "JAX's word for it",
    "torch layers.normalization.LayerNorm.__init__(eps)": "PyTorch's word for it",
    "jax layers.normalization.LayerNorm.forward(x)": "called `input` in the class derived from",
    "torch layers.normalization.LayerNorm.forward(input)": "the name of the class derived from",
    "jax layers.linear.OutputProjection.forward(x)": "called `input` in the class derived from",
    "torch layers.linear.OutputProjection.forward(input)": "the name of the class derived from",
    "jax layers.audio.Conv1d.forward(x)": "called `input` in the class derived from",
    "torch layers.audio.Conv1d.forward(input)": "the name of the class derived from",
    "jax layers.linear.OutputProjection.__init__(tied)": "PyTorch ties by assigning the weight",
    "jax layers.linear.OutputProjection.forward(table)": "PyTorch ties by assigning the weight",
    "jax models.encoder_decoder.Encoder.forward(embedding)": "PyTorch ties by assigning the weight",
    "jax models.half.Half.embed(embedding)": "PyTorch ties by assigning the weight",
    "jax layers.attention.fused_obstacle(query)": "in JAX float64 has no fused form",
    "jax models.encoder_only.TokenHead.forward(table)": "PyTorch ties by assigning the weight",
    "jax training.step.batch_loss(graphdef)": "a model in parts",
    "jax training.step.batch_loss(params)": "a model in parts",
    "jax training.step.batch_loss(buffers)": "a model in parts",
    "torch training.step.batch_loss(model)": "a model in one",
    # Defaults.
    "both models.encoder_decoder.EncoderDecoder.forward(*_mask): default": (
        "the document makes masks from token values; in JAX they are given"
    ),
}

# Public in both, yet without a case of their own.
COVERED_ELSEWHERE = {
    "layers.mask.check_boolean": "raises or does nothing: test_mask, test_attention",
    "layers.feedforward.gated_width": "a whole number: test_feedforward",
    "layers.position.sinusoidal_table": "compared as a table: test_position",
    "layers.position.position_rows": "by the encodings that read rows",
    "layers.position_bias.bucket_table": "by the buckets that it has",
    "layers.position_bias.get_alibi_slopes": "compared as a table: test_position_bias",
    "layers.rotary.inverse_frequencies": "compared as a table: test_rotary",
    "layers.rotary.rotated_width": "by the frequencies of so many features",
    "layers.rotary.grown_base": "by the frequencies of the dynamic scaling",
    "layers.rotary.yarn_ramp": "by the frequencies of YaRN",
    "layers.rotary.yarn_attention_factor": "by the frequencies of YaRN",
    "layers.rotary.longrope_frequencies": "by the frequencies of LongRoPE",
    "layers.rotary.longrope_attention_factor": "by the frequencies of LongRoPE",
    "layers.rotary.make_angles": "by the tables made of them",
    "layers.rotary.rotary_tables": "by the encoding of every scaling",
    "layers.rotary.half_from_adjacent": "compared as a table: test_rotary",
    "layers.rotary.adjacent_from_half": "compared as a table: test_rotary",
    "layers.rotary.permute_heads": "compared as a table: test_rotary",
    "layers.attention.attention_scores": "by dot_product_attention, which multiplies with it",
    "layers.attention.weighted_values": "by dot_product_attention, which sums with it",
    "layers.attention.fused_attention": "by dot_product_attention with implementation='fused'",
    "layers.attention.fused_obstacle": "raises or does nothing: test_attention",
    "layers.block.document_config": "by the document's layers",
    "layers.block.make_attention": "by the blocks that it builds for",
    "models.half.Half": "by Encoder and Decoder",
    "models.half.embedding_scale": "a number: test_half",
    "models.half.position_bias_layer": "by Encoder and Decoder",
    "models.half.position_encoding_layer": "by Encoder and Decoder",
    "models.encoder_only.EncoderOutput": "what EncoderOnly returns",
    "models.encoder_only.TokenHead": "by EncoderOnly, whose table it reads",
    "models.initialization.initialize_normal": "draws random numbers: test_initialization",
    "models.initialization.residual_std": "by the parameters drawn with it: test_initialization",
    "training.loss.LossSum": "what cross_entropy returns",
    "training.schedule.cosine_rate": "ten thousand rates: test_schedule",
    "training.schedule.wsd_rate": "ten thousand rates: test_schedule",
    "training.schedule.fraction": "by the rates that it is a part of",
    "training.step.StepMetrics": "what a step returns: test_step",
    "training.step.language_loss": "packed and unpacked: test_packing",
    "training.step.batch_loss": "by fifty updates: test_step",
}

CASE_MODULES = sorted(
    f"parity_tests.{folder}.{path.stem}"
    for folder in ("layers", "models", "training")
    for path in (TESTS / folder).glob("test_*.py")
    if "declare(" in path.read_text()
)


def is_mirrored(name):
    return any(fnmatch.fnmatch(name, pattern) for pattern in MIRRORED)


def files(package):
    """`layers.attention` and so on."""
    root = ROOTS[package]
    names = (".".join(path.relative_to(root).with_suffix("").parts) for path in root.rglob("*.py"))
    return {name for name in names if not name.endswith("__init__") and is_mirrored(name)}


def public(package, file):
    """The module's own public names."""
    root = {"jax": "jax_transformer", "torch": "torch_reference"}[package]
    module = importlib.import_module(f"{root}.{file}")
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_")
        and callable(value)
        and getattr(value, "__module__", None) == module.__name__
    }


def methods(cls):
    """Constructor and public methods that the class itself defines; `__call__` is `forward`."""
    names = {
        name: getattr(cls, name)
        for name, value in vars(cls).items()
        if (inspect.isfunction(value) or isinstance(value, classmethod))
        and (not name.startswith("_") or name in ("__init__", "__call__"))
    }
    return {"forward" if name == "__call__" else name: value for name, value in names.items()}


def only_in_one(place, ours, theirs):
    yield from (f"jax {place.format(name)}" for name in ours if name not in theirs)
    yield from (f"torch {place.format(name)}" for name in theirs if name not in ours)


def argument_differences(place, ours, theirs):
    """Names, order and defaults of the arguments of two functions."""
    ours, theirs = (inspect.signature(function).parameters for function in (ours, theirs))
    yield from only_in_one(f"{place}({{}})", ours, theirs)
    common = [name for name in ours if name in theirs]
    if common != [name for name in theirs if name in ours]:
        yield f"both {place}: order"
    for name in common:
        if ours[name].default != theirs[name].default:
            yield f"both {place}({name}): default"


def differences():
    ours, theirs = files("jax"), files("torch")
    yield from only_in_one("{}", sorted(ours), sorted(theirs))
    for file in sorted(ours & theirs):
        first, second = public("jax", file), public("torch", file)
        yield from only_in_one(f"{file}.{{}}", first, second)
        for name in sorted(first.keys() & second.keys()):
            place = f"{file}.{name}"
            if not inspect.isclass(first[name]):
                yield from argument_differences(place, first[name], second[name])
                continue
            pair = methods(first[name]), methods(second[name])
            yield from only_in_one(f"{place}.{{}}", *pair)
            for method in sorted(pair[0].keys() & pair[1].keys()):
                yield from argument_differences(
                    f"{place}.{method}", pair[0][method], pair[1][method]
                )


def test_whatever_one_package_has_the_other_has_or_there_is_a_reason():
    unexplained = [
        difference
        for difference in differences()
        if not any(fnmatch.fnmatchcase(difference, pattern) for pattern in EXCEPTIONS)
    ]
    assert not unexplained


def test_no_exception_is_out_of_date():
    found = list(differences())
    assert [p for p in EXCEPTIONS if not fnmatch.filter(found, p)] == []


def test_fields_of_named_tuples_are_the_same():
    from jax_transformer.models import EncoderOutput
    from jax_transformer.training import loss, step
    from torch_reference.models import EncoderOutput as ReferenceEncoderOutput
    from torch_reference.training import loss as reference_loss
    from torch_reference.training import step as reference_step

    assert loss.LossSum._fields == reference_loss.LossSum._fields
    assert EncoderOutput._fields == ReferenceEncoderOutput._fields
    assert step.StepMetrics._fields == reference_step.StepMetrics._fields


@pytest.fixture(scope="module")
def with_cases():
    """What the cases of all test modules call."""
    for module in CASE_MODULES:
        importlib.import_module(module)
    return {f"{case.jax.__module__}.{case.jax.__name__}" for case in REGISTRY}


def shared_names():
    """Public in both packages, and JAX's layers that PyTorch has of its own."""
    for file in sorted(files("jax") & files("torch")):
        yield from (
            f"{file}.{name}"
            for name in sorted(public("jax", file).keys() & public("torch", file).keys())
        )
    yield from ("layers.linear.Linear", "layers.linear.Embedding")


@pytest.mark.parametrize("name", shared_names())
def test_whatever_both_have_has_a_parity_case(name, with_cases):
    assert (f"jax_transformer.{name}" in with_cases) != (name in COVERED_ELSEWHERE)


def test_no_name_is_covered_elsewhere_that_is_not_there():
    assert set(COVERED_ELSEWHERE) <= set(shared_names())


@pytest.mark.parametrize("name", sorted(files("jax") | {"training.optimizer"}))
def test_every_file_has_a_test_file(name):
    folder, _, file = name.partition(".")
    assert (TESTS / folder / f"test_{file}.py").exists()
