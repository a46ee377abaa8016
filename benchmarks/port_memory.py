"""Ports a synthetic checkpoint from every file format to every other, tensor by tensor.

    python -m benchmarks.port_memory --megabytes 4000 --directory /tmp/port

Prints, for each pair, the peak of resident memory above the interpreter's own (which must be at
most the largest tensor x 2 + 200 MB) and the speed against `cp` of the same bytes on the same disk,
each of them up to the moment when the bytes are on the disk (`fsync`). The weights are those of a
Llama; `--transpose True` transposes every matrix on the way.
"""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import tyro

from jax_transformer.porting.formats import (
    huggingface,
    meta,
    orbax_run,
    safetensors_file,
    torch_file,
)
from jax_transformer.porting.formats.base import Writer
from jax_transformer.porting.operations import Transpose
from jax_transformer.porting.plan import Header, Plan, make_plan
from jax_transformer.porting.recognise import open_checkpoint
from jax_transformer.porting.rules import Rule
from jax_transformer.porting.stream import copy_plan, port

FORMATS = ("safetensors", "pt", "huggingface", "meta", "orbax")
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
WIDTH = 2048


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    megabytes: int = 400
    """Size of the checkpoint."""
    directory: Path | None = None
    """Where to write: three times the size; by default in the system's place for such."""
    transpose: bool = False
    """Transpose every matrix on the way, as between PyTorch and JAX."""
    formats: tuple[str, ...] = FORMATS


def shapes(megabytes: int) -> dict[str, Header]:
    """The tensors of a Llama of that size, an embedding of 131 MB the largest."""
    layer = {
        "attention.wq.weight": (WIDTH, WIDTH),
        "attention.wk.weight": (WIDTH // 4, WIDTH),
        "attention.wv.weight": (WIDTH // 4, WIDTH),
        "attention.wo.weight": (WIDTH, WIDTH),
        "feed_forward.w1.weight": (4 * WIDTH, WIDTH),
        "feed_forward.w2.weight": (WIDTH, 4 * WIDTH),
        "feed_forward.w3.weight": (4 * WIDTH, WIDTH),
        "attention_norm.weight": (WIDTH,),
        "ffn_norm.weight": (WIDTH,),
    }
    headers = {
        "tok_embeddings.weight": Header((32000, WIDTH), BFLOAT16),
        "norm.weight": Header((WIDTH,), BFLOAT16),
        "output.weight": Header((32000, WIDTH), BFLOAT16),
    }
    number = 0
    while sum(header.nbytes for header in headers.values()) < megabytes * 10**6:
        headers |= {f"layers.{number}.{n}": Header(s, BFLOAT16) for n, s in layer.items()}
        number += 1
    return headers


def numbers(headers: Mapping[str, Header]) -> Iterator[tuple[str, np.ndarray]]:
    """Random bits, which no file system compresses: one row of them, turned for each tensor."""
    noise = np.random.default_rng(0).integers(0, 1 << 16, 1 << 24, np.uint16)
    for index, (name, header) in enumerate(headers.items()):
        elements = int(np.prod(header.shape))
        repeats = -(-elements // len(noise))
        data = np.tile(np.roll(noise, index), repeats)[:elements]
        yield name, data.view(BFLOAT16).reshape(header.shape)


def writer(name: str, path: Path, headers: Mapping[str, Header]) -> Writer:
    """The writer of a format."""
    match name:
        case "safetensors":
            return safetensors_file.FileWriter(path, headers)
        case "pt":
            return torch_file.FileWriter(path, headers)
        case "huggingface":
            return huggingface.FolderWriter(path, headers, config={}, shard_bytes=10**9)
        case "meta":
            return meta.FolderWriter(path, headers, config={"dim": WIDTH}, shards=2)
        case "orbax":
            return orbax_run.FolderWriter(path, headers, config={"model": {}})
    raise ValueError(name)


def peak() -> int:
    """The most bytes of resident memory since it was last forgotten."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def measure(source: Path, target: Path, target_format: str, transpose: bool) -> None:
    """Port once and print bytes and seconds; a process of its own."""
    tensors = open_checkpoint(source).tensors
    matrices: Plan = copy_plan(tensors)
    if transpose:
        turned = [
            Rule(n, n, (Transpose(),) if len(t.shape) == 2 else ()) for n, t in tensors.items()
        ]
        matrices = make_plan(turned, tensors, None)
    if target_format == "orbax":
        import orbax.checkpoint  # noqa: F401  part of the interpreter's own
    Path("/proc/self/clear_refs").write_text("5")
    before, start = peak(), time.perf_counter()
    port(matrices, tensors, lambda headers: writer(target_format, target, headers))
    print(json.dumps({"bytes": peak() - before, "seconds": time.perf_counter() - start}))


def copy_seconds(source: Path, target: Path) -> float:
    """`cp`, and the bytes on the disk."""
    start = time.perf_counter()
    subprocess.run(["cp", "-r", source, target], check=True)
    for file in [target] if target.is_file() else target.rglob("*"):
        if file.is_file():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
    return time.perf_counter() - start


def remove(path: Path) -> None:
    """A file with its manifest, or a folder."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
        path.with_name(f"{path.name}.manifest.json").unlink(missing_ok=True)


def run(options: Options, folder: Path) -> None:
    """Every pair, and what each must keep to."""
    headers = shapes(options.megabytes)
    largest = max(header.nbytes for header in headers.values())
    limit = 2 * largest + 200 * 10**6
    total = sum(header.nbytes for header in headers.values())
    print(
        f"{len(headers)} tensors, {total / 1e6:,.0f} MB, largest {largest / 1e6:,.0f} MB: at most "
        f"{limit / 1e6:,.0f} MB, at least half the speed of cp"
    )
    print(f"{'from':<12} {'to':<12} {'peak MB':>8} {'MB/s':>6} {'cp MB/s':>8} {'ratio':>6}")
    for source_format in options.formats:
        source = folder / f"source.{source_format}"
        with writer(source_format, source, headers) as opened:
            for name, array in numbers(headers):
                opened.add(name, array)
        for target_format in options.formats:
            target = folder / f"target.{target_format}"
            arguments = [str(source), str(target), target_format, str(int(options.transpose))]
            child = [sys.executable, "-m", "benchmarks.port_memory", "--one", *arguments]
            result = json.loads(subprocess.run(child, capture_output=True, check=True).stdout)
            cp = copy_seconds(source, folder / "copy")
            remove(folder / "copy")
            remove(target)
            verdict = "" if result["bytes"] <= limit else "  TOO MUCH"
            print(
                f"{source_format:<12} {target_format:<12} {result['bytes'] / 1e6:>8,.0f} "
                f"{total / 1e6 / result['seconds']:>6,.0f} {total / 1e6 / cp:>8,.0f} "
                f"{cp / result['seconds']:>6.2f}{verdict}",
                flush=True,
            )
        remove(source)


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        source, target, target_format, transpose = sys.argv[2:]
        measure(Path(source), Path(target), target_format, bool(int(transpose)))
        return
    options = tyro.cli(Options, config=(tyro.conf.FlagConversionOff,))
    if options.directory is not None:
        options.directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        run(options, Path(folder))


if __name__ == "__main__":
    main()
