"""Text from a small random model: that of `transformers`, row by row, piece by piece."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx

from jax_transformer.config import DecoderOnlyConfig, GenerationConfig, LayerConfig, RotaryConfig
from jax_transformer.decoding import generate, program
from jax_transformer.decoding.generate import TextGenerator
from jax_transformer.decoding.sampling import Greedy, make_strategy
from jax_transformer.errors import InputError
from jax_transformer.models.decoder_only import DecoderOnly
from jax_transformer.models.parameters import split
from parity_tests.harness import QUICK
from parity_tests.harness.weights import carry
from parity_tests.models import third_party
from torch_reference.models import decoder_only as reference

V, MAX_LEN, TOKENS = 60, 120, 24
CONFIG = DecoderOnlyConfig(
    vocab_size=V,
    num_layers=2,
    position="rotary",
    max_len=MAX_LEN,
    layer=LayerConfig(
        d_model=16,
        num_heads=4,
        num_kv_heads=2,
        d_ff=24,
        norm="rms",
        qkv_bias=False,
        out_bias=False,
        ffn_bias=False,
        gated=True,
        activation="silu",
        rotary=RotaryConfig(pairing="half"),
        causal=True,
    ),
)
PROMPTS = ["hello", "a", "what is this", "the quick brown fox jumps over it"]


class Letters:
    """A token for each of the characters from the space on; those in `é` take two."""

    def encode(self, text):
        return [token for char in text for token in self.tokens(char)]

    def tokens(self, char):
        return [V - 2, V - 1] if char == "é" else [(ord(char) - 32) % (V - 2)]

    def decode(self, ids):
        text = "".join({V - 2: "<", V - 1: ">"}.get(token, chr(token + 32)) for token in ids)
        text = text.replace("<>", "é")
        return "".join("\N{REPLACEMENT CHARACTER}" if char in "<>" else char for char in text)


@pytest.fixture(autouse=True)
def float64(monkeypatch):
    for name, statics in (
        ("prefill", ("structure", "strategy", "slots", "end_ids")),
        ("step", ("structure", "strategy", "end_ids")),
    ):
        monkeypatch.setattr(generate, name, quick(name, statics))
    with jax.enable_x64(True):
        yield


@functools.cache
def quick(name, statics):
    """The program, compiled in a third of the time."""
    function = getattr(program, name).__wrapped__
    return jax.jit(function, static_argnames=statics, compiler_options=QUICK)


@functools.cache
def models():
    """Their model, and ours with its weights."""
    layer = CONFIG.layer
    settings = transformers.LlamaConfig(
        vocab_size=V,
        hidden_size=layer.d_model,
        intermediate_size=layer.d_ff,
        num_hidden_layers=CONFIG.num_layers,
        num_attention_heads=layer.num_heads,
        num_key_value_heads=layer.num_kv_heads,
        rms_norm_eps=layer.norm_epsilon,
        max_position_embeddings=MAX_LEN,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        pad_token_id=0,
        eos_token_id=None,
    )
    theirs = third_party.make_model(transformers.LlamaForCausalLM, settings)
    weights = third_party.LLAMA.weights(theirs, CONFIG.num_layers, layer.num_heads)
    torch_model = reference.DecoderOnly(CONFIG).double().eval()
    torch_model.load_state_dict(weights, strict=True)
    skeleton = nnx.eval_shape(lambda: DecoderOnly(CONFIG, rngs=nnx.Rngs(0)))
    return theirs, split(carry(torch_model, skeleton, "", jnp.float64))


def generator(**options):
    return TextGenerator(*models()[1], CONFIG, Letters(), **options)


@functools.cache
def greedy():
    """What follows each prompt, without an end."""
    return tuple(generator()(PROMPTS, max_tokens=TOKENS))


def test_greedy_text_is_that_of_transformers():
    theirs, _ = models()
    for prompt, found in zip(PROMPTS, greedy(), strict=True):
        ids = torch.tensor([Letters().encode(prompt)])
        with third_party.float64(), torch.no_grad():
            result = theirs.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=TOKENS,
                output_logits=True,
                return_dict_in_generate=True,
            )
        # Token for token is fair: no two best logits are within the tolerance of logits.
        best = torch.cat(result.logits).topk(2).values
        assert float((best[:, 0] - best[:, 1]).min()) > 1e-6
        assert found.tokens == result.sequences[0, ids.shape[1] :].tolist()
        assert found.reason == "length"
    assert len({token for each in greedy() for token in each.tokens}) > 10


@pytest.mark.parametrize("rows_per_batch", [1, 2, 3])
def test_prompts_of_any_lengths_are_continued_as_each_alone(rows_per_batch):
    assert tuple(generator(rows_per_batch=rows_per_batch)(PROMPTS, max_tokens=TOKENS)) == greedy()


@pytest.mark.parametrize(
    "strategy",
    [
        make_strategy(temperature=1.2, top_k=20, seed=4),
        make_strategy(top_p=0.9, min_p=0.01, repetition_penalty=1.3, seed=1),
    ],
    ids=repr,
)
def test_draws_are_the_same_in_any_batches_and_again(strategy):
    first, again, narrow = (
        generator(rows_per_batch=rows)(PROMPTS, max_tokens=TOKENS, strategy=strategy)
        for rows in (16, 16, 1)
    )
    assert first == again == narrow
    assert len({each.text for each in (*first, *greedy())}) == 2 * len(PROMPTS)
    # Equal prompts are drawn for differently.
    one, other = generator()(PROMPTS[:1] * 2, max_tokens=TOKENS, strategy=strategy)
    assert one == first[0] != other


def test_an_end_token_ends_a_row_and_is_not_text():
    free = greedy()
    end = free[0].tokens[3]
    found = generator(rules=GenerationConfig(end_ids=(end,)))(PROMPTS, max_tokens=TOKENS)
    for row, whole in zip(found, free, strict=True):
        if end in whole.tokens:
            count = whole.tokens.index(end)
            assert row.reason == "end"
            assert row.tokens == whole.tokens[: count + 1]
            assert row.text == continuation(row, whole.tokens[:count])
        else:
            assert row == whole
    assert {row.reason for row in found} >= {"end"}


def continuation(row, tokens):
    prompt = PROMPTS[[each.tokens[:1] for each in greedy()].index(row.tokens[:1])]
    text = Letters().decode(Letters().encode(prompt) + tokens)
    return text[len(Letters().decode(Letters().encode(prompt))) :]


def test_a_stop_string_ends_a_row_and_is_cut():
    whole = greedy()[2].text
    stop = whole[5:8]
    found = generator()(PROMPTS, max_tokens=TOKENS, stops=["not in there", stop])[2]
    assert found.text == whole[: whole.index(stop)]
    assert found.reason == "stop"
    assert len(found.tokens) < TOKENS


@pytest.mark.parametrize("stops", [(), ("stop",), ("abc", "b")])
def test_streamed_pieces_joined_are_the_text(stops):
    for strategy in (Greedy(), make_strategy(temperature=1.0, seed=3)):
        (whole,) = generator()(PROMPTS[:1], max_tokens=TOKENS, strategy=strategy, stops=stops)
        pieces = list(
            generator().stream(PROMPTS[0], max_tokens=TOKENS, strategy=strategy, stops=stops)
        )
        assert "".join(pieces) == whole.text
        assert "" not in pieces


def test_the_first_piece_comes_before_the_second_step(monkeypatch):
    count = []
    original = generate.step
    monkeypatch.setattr(generate, "step", lambda *a, **k: count.append(1) or original(*a, **k))
    stream = generator().stream(PROMPTS[0], max_tokens=TOKENS)
    next(stream)
    # One runs ahead, while the caller looks at the first.
    assert len(count) == 1
    list(stream)
    assert len(count) == TOKENS - 1


def test_decoding_stops_when_all_rows_are_over(monkeypatch):
    count = []
    original = generate.step
    monkeypatch.setattr(generate, "step", lambda *a, **k: count.append(1) or original(*a, **k))
    end = greedy()[0].tokens[2]
    generator(rules=GenerationConfig(end_ids=(end,)))(PROMPTS[:1], max_tokens=TOKENS)
    assert len(count) == greedy()[0].tokens.index(end) + 1
    count.clear()
    generator()(PROMPTS[:1], max_tokens=TOKENS, stops=[greedy()[0].text[2]])
    assert len(count) < TOKENS - 1


def test_64_tokens_after_prompts_of_5_6_and_7_compile_two_programs(monkeypatch):
    chex.clear_trace_counter()
    for name, statics in (
        ("prefill", ("structure", "strategy", "slots", "end_ids")),
        ("step", ("structure", "strategy", "end_ids")),
    ):
        once = chex.assert_max_traces(getattr(program, name).__wrapped__, n=1)
        compiled = jax.jit(once, static_argnames=statics, compiler_options=QUICK)
        monkeypatch.setattr(generate, name, compiled)
    for prompt in ("abcde", "abcdef", "abcdefg"):
        # A new one each time, as it is made for samples while a model trains.
        (found,) = generator()([prompt], max_tokens=64)
        assert len(found.tokens) == 64


def test_what_cannot_be_generated_is_refused_before_anything_runs(monkeypatch):
    monkeypatch.setattr(generate, "prefill", None)
    make = generator()
    for call in (make.__call__, lambda prompts, **options: make.stream(prompts[0], **options)):
        message = "prompt 1 has 100 tokens, .*21 more than the 120 .*, or generate at most 20"
        with pytest.raises(InputError, match=f"^{message}$"):
            call(["x" * 100], max_tokens=21)
        with pytest.raises(InputError, match=r"^max_tokens=0: must be at least 1$"):
            call(["x"], max_tokens=0)
        with pytest.raises(InputError, match=r"^prompt 1 has no token"):
            call([""], max_tokens=5)
        with pytest.raises(InputError, match=r"^a stop string is empty"):
            call(["x"], max_tokens=5, stops=[""])


def test_a_prompt_and_its_text_may_fill_the_model():
    (found,) = generator()(["x" * 100], max_tokens=20)
    assert len(found.tokens) == 20
    assert generator()([], max_tokens=5) == []


def test_a_start_token_is_put_before_each_prompt():
    (found,) = generator(rules=GenerationConfig(start_id=7))(["hello"], max_tokens=TOKENS)
    (expected,) = generator()([chr(7 + 32) + "hello"], max_tokens=TOKENS)
    assert found.tokens == expected.tokens
    (found,) = generator(rules=GenerationConfig(start_id=7))([""], max_tokens=TOKENS)
    assert len(found.tokens) == TOKENS


def test_a_model_that_gives_nan_is_an_error():
    graphdef, params, buffers = models()[1]
    spoilt = jax.tree.map(lambda leaf: np.asarray(leaf) * np.nan, params)
    bad = TextGenerator(graphdef, spoilt, buffers, CONFIG, Letters())
    with pytest.raises(InputError, match=r"^prompt 1: the model gives no number for what follows "
                       r"after 0 tokens: its parameters, or its logits, are NaN$"):  # fmt: skip
        bad(PROMPTS, max_tokens=3)


@pytest.mark.parametrize(
    "rule",
    [
        {"prompt": (1,)},
        {"first_id": 1},
        {"last_id": 1},
        {"suppressed_first_ids": (1,)},
        {"min_tokens": 2},
        {"no_repeat_ngram": 2},
    ],
    ids=str,
)
def test_rules_that_count_from_the_beginning_of_a_text_are_refused(rule):
    (name,) = rule
    with pytest.raises(InputError, match=rf"^{name}=.*: only encoder-decoders keep that"):
        generator(rules=GenerationConfig(**rule))
