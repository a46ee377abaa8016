"""Vocabularies of Marian, as `transformers` reads them; `tokenizer.json` is in test_pretrained."""

import io
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
import transformers

from jax_transformer.cli import main
from jax_transformer.errors import InputError
from jax_transformer.porting.text import MarianTokenizer
from parity_tests import tiny
from parity_tests.porting.families import test_marian

SOURCE = ("the cat sat on the mat", "a dog ran to the café", "the naïve cat ran too", "a mat, 1234")
TARGET = ("die katze saß auf der matte", "ein hund lief ins café", "die katze lief auch", "matte")
TEXTS = (*SOURCE, "", "  two  spaces ", "日本 z", ">>deu<< the cat", ">>deu<<the cat", ">> no code")


def model_of(texts) -> bytes:
    """A small model of SentencePiece."""
    file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts * 3),
        model_writer=file,
        vocab_size=48,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return file.getvalue()


def save(folder: Path, *, own: bool = False) -> Path:
    """The files of a tokenizer, of one vocabulary or of two."""
    pieces: dict[str, list[str]] = {}
    for name, texts in (("source", SOURCE), ("target", TARGET)):
        (folder / f"{name}.spm").write_bytes(model_of(texts))
        spm = sentencepiece.SentencePieceProcessor(model_file=str(folder / f"{name}.spm"))
        # Some pieces are left out, as in published files.
        pieces[name] = [spm.IdToPiece(number) for number in range(3, spm.GetPieceSize() - 4)]
    source = pieces["source"] if own else sorted({*pieces["source"], *pieces["target"]})
    tables = {"vocab.json": source} | ({"target_vocab.json": pieces["target"]} if own else {})
    for name, words in tables.items():
        tokens = ["</s>", "<unk>", ">>deu<<", *words, "<pad>"]
        ids = {token: number for number, token in enumerate(tokens)}
        (folder / name).write_text(json.dumps(ids), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"separate_vocabs": own}))
    return folder


def theirs(folder: Path, own: bool) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # It recommends a package.
        return transformers.MarianTokenizer(
            source_spm=str(folder / "source.spm"),
            target_spm=str(folder / "target.spm"),
            vocab=str(folder / "vocab.json"),
            target_vocab_file=str(folder / "target_vocab.json") if own else None,
            separate_vocabs=own,
        )


@pytest.mark.parametrize("own", [False, True], ids=["one vocabulary", "two vocabularies"])
def test_tokens_and_texts_are_those_of_transformers(own, tmp_path):
    files = {file.name: file for file in save(tmp_path, own=own).iterdir()}
    ours, expected = MarianTokenizer(files), theirs(tmp_path, own)
    for text, ids in zip(TEXTS, ours.encode_batch(TEXTS), strict=True):
        assert ids == expected(text).input_ids, text
    for text, ids in zip(TARGET, ours.encode_targets(TARGET), strict=True):
        assert ids == expected(text_target=text).input_ids, text
        assert ours.pieces(ids)[-1] == "</s>"
    some = [[3, 9, 4, 7, 0], [1, 12, 13, 11], [2, 8, 8], []]
    for ids in some:
        assert ours.decode(ids) == expected.decode(ids, skip_special_tokens=True)


def test_a_ported_folder_translates_with_its_files(tmp_path, capsys):
    folder = tmp_path / "theirs"
    folder.mkdir()
    save(folder)
    words = theirs(folder, own=False)
    size = words.vocab_size
    small = test_marian.example(
        "small", vocab_size=size, pad_token_id=size - 1, max_position_embeddings=64
    )
    model: Any = small.model(torch.float32)
    model.generation_config = transformers.GenerationConfig(
        decoder_start_token_id=size - 1,
        pad_token_id=size - 1,
        eos_token_id=0,
        bad_words_ids=[[size - 1]],
        max_length=9,
    )
    model.save_pretrained(folder)
    with torch.no_grad():
        ids = model.generate(**words(SOURCE[1], return_tensors="pt"))[0]
    expected = words.decode(ids, skip_special_tokens=True)
    assert expected
    main(["port", str(folder), str(tmp_path / "ours")])
    capsys.readouterr()
    with tiny.quick_programs():
        main(["generate", str(tmp_path / "ours"), "--text", SOURCE[1]])
    assert capsys.readouterr().out == " ".join(expected.split()) + "\n"


def test_damaged_files_are_refused_and_a_text_too_long_is(tmp_path):
    files = {file.name: file for file in save(tmp_path).iterdir()}
    with pytest.raises(InputError, match=r"'the cat sat on the mat' has .* more than the 3 that"):
        MarianTokenizer(files).encode_batch(SOURCE, max_length=3)
    files["source.spm"].write_bytes(b"none")
    with pytest.raises(InputError, match=r"source\.spm is no model of SentencePiece"):
        MarianTokenizer(files)
    files["vocab.json"].write_text('{"</s>": 0}')
    with pytest.raises(InputError, match=r"vocab\.json has no <unk>"):
        MarianTokenizer(files)
