"""`jax-transformer verify`: exit codes, table, JSON, one line for bad input."""

import json
import shutil

import numpy as np
import pytest
import torch

from jax_transformer.cli import main
from jax_transformer.models.parameters import flatten
from jax_transformer.porting.pretrained import from_pretrained
from jax_transformer.verification.reference import carry_into, reference_model
from parity_tests.porting.checkpoints import GPT2, LLAMA, save
from parity_tests.porting.families import test_bart


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save(LLAMA, tmp_path_factory.mktemp("models") / "llama")


def run(*arguments):
    """The exit code."""
    try:
        main(["verify", *map(str, arguments)])
    except SystemExit as exit_:
        return exit_.code
    return 0


def edited(folder, path, **changes):
    """A copy with other fields in its config."""
    shutil.copytree(folder, path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))
    return path


def test_a_folder_is_the_same_as_itself(llama, tmp_path, capsys):
    assert run(llama, llama, "--backward", "--json", tmp_path / "report.json") == 0
    printed = capsys.readouterr().out
    assert "the same function, as accurate in float32" in printed
    assert "q_proj" in printed
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["same"] is True
    assert report["errors"]["layers.1:out"] < 1e-12
    assert report["gradients"]["layers.0.norm1:in"] < 1e-12


def test_another_model_of_transformers_its_training_and_decoding(tmp_path, capsys):
    folder = save(GPT2, tmp_path / "gpt2")
    files = tmp_path / "report.json", tmp_path / "page.html"
    flags = ("--steps", 2, "--decode", "--json", files[0], "--html", files[1])
    assert run(folder, folder, "--dtype", "none", *flags) == 0
    printed = capsys.readouterr().out
    assert (
        "the same function, trained alike for 2 steps, the same 36 tokens decoded, with cache and "
        "without" in printed
    )
    assert "reference, cached" in printed
    assert printed.count("together") == 2
    trajectory = json.loads(files[0].read_text())["trajectory"]
    assert trajectory["parting"] is None
    assert trajectory["errors"][1]["parameter"]["layers.1.ffn.linear2.kernel"] < 1e-12
    ways = {way["name"]: way for way in json.loads(files[0].read_text())["decoding"]["ways"]}
    assert ways["ours, cached"]["error"] < 1e-12
    assert ways["ours, cached"]["tokens"] == ways["reference"]["tokens"]
    page = files[1].read_text()
    assert "<h2>Training in float64</h2>\n<p>trained alike for 2 steps</p>" in page
    assert "<h2>Decoding in float64</h2>" in page


def test_a_translator_of_transformers(tmp_path, capsys):
    """BART: the bias of its head is a buffer there; it begins with the end token."""
    folder = save(test_bart.EXAMPLES[0], tmp_path / "bart")
    assert run(folder, folder, "--dtype", "none", "--steps", 1, "--decode") == 0
    printed = capsys.readouterr().out
    assert "not trained, as one side alone has it as a parameter: output_proj.bias" in printed
    assert "the same function, trained alike for 1 step, the same 36 tokens decoded" in printed
    other = edited(folder, tmp_path / "other", decoder_start_token_id=1)
    settings = json.loads((other / "generation_config.json").read_text())
    settings["decoder_start_token_id"] = 1
    (other / "generation_config.json").write_text(json.dumps(settings))
    assert run(folder, other, "--dtype", "none", "--decode") == 1
    assert "the start token is 1, not " in capsys.readouterr().out


def test_a_config_that_was_not_taken_over_is_named(llama, tmp_path, capsys):
    other = edited(llama, tmp_path / "other", rms_norm_eps=1e-3)
    page = tmp_path / "page.html"
    assert run(llama, other, "--dtype", "none", "--html", page) == 1
    printed = capsys.readouterr().out
    assert "different: `layers.0.norm1`: agrees when epsilon is" in printed
    text = page.read_text()
    assert "<code>layers.0.norm1</code>: agrees when epsilon is 0.001" in text
    assert "http://" not in text
    assert "<script" not in text


def test_a_file_of_the_reference_in_pytorch(llama, tmp_path, capsys):
    model = from_pretrained(llama)
    theirs = reference_model(model.config)
    leaves = {name: np.asarray(leaf) for name, leaf in flatten(model.params).items()}
    carry_into(theirs, leaves, tmp_path)
    torch.save(theirs.state_dict(), tmp_path / "reference.pt")
    assert run(llama, tmp_path / "reference.pt", "--dtype", "none") == 0
    with torch.no_grad():
        theirs.layers[1].ffn.up_proj.weight[0, 0] *= 1.01
    torch.save(theirs.state_dict(), tmp_path / "changed.pt")
    assert run(llama, tmp_path / "changed.pt", "--dtype", "none") == 1
    assert "`layers.1.ffn.up_proj`" in capsys.readouterr().out


def test_what_cannot_be_compared_is_one_line_and_code_2(llama, tmp_path, capsys):
    missing = tmp_path / "missing"
    torch.save({"a.weight": torch.zeros(2)}, tmp_path / "other.pt")
    (tmp_path / "there.json").write_text("{}")
    for arguments, said in (
        ((llama, missing), "missing"),
        ((missing, llama), "missing"),
        ((llama, tmp_path / "other.pt"), "is no model of this config: a.weight has no place"),
        ((llama, llama, "--json", tmp_path / "there.json"), "is there already"),
        ((llama, llama, "--json", missing / "x.json"), "is no directory"),
        ((llama, llama, "--dtype", "int8"), "dtype"),
        ((llama, llama, "--steps", "0"), "--steps 0: must be at least 1"),
        ((llama, llama, "--steps", "x"), "--steps: 'x' is not a whole number"),
        ((llama,), "REFERENCE"),
    ):
        assert run(*arguments) == 2
        captured = capsys.readouterr().err
        assert said in captured
        assert captured.startswith("error: ")
        assert captured.count("\n") == 1


def test_the_page_shows_how_the_errors_of_the_worst_tensor_are_distributed(llama, tmp_path):
    run(llama, llama, "--html", tmp_path / "same.html", "--json", tmp_path / "same.json")
    histogram = json.loads((tmp_path / "same.json").read_text())["histogram"]
    text = (tmp_path / "same.html").read_text()
    assert f"<code>{histogram['point']}</code> in float32" in text
    assert text.count('<rect class="ours"') == text.count('<rect class="theirs"') > 2
    other = edited(llama, tmp_path / "other", rms_norm_eps=1e-3)
    run(llama, other, "--dtype", "none", "--html", tmp_path / "other.html")
    assert "<code>layers.0.norm1:out</code> in float64" in (tmp_path / "other.html").read_text()
