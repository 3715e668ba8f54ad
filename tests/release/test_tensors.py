"""Against the safetensors library itself, and files broken on purpose."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_torch
from safetensors.torch import save_file as save_torch

from confide.errors import ModelError
from confide.release import shards
from confide.release.shards import write_tensors
from confide.release.tensors import Checkpoint, decode, encode

TENSORS = {
    "a.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.array(3.5, dtype=np.float64),
    "c": np.array([[1, -2]], dtype=np.int64),
    "empty": np.zeros((0, 4), dtype=np.float16),
    "flag": np.array([True, False]),
}


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.names == tuple(sorted(TENSORS))
    for name, expected in TENSORS.items():
        assert checkpoint.shape(name) == expected.shape
        np.testing.assert_array_equal(checkpoint.numpy(name), expected)
        assert checkpoint.numpy(name).dtype == expected.dtype
        assert b"".join(map(bytes, checkpoint.pieces(name))) == expected.tobytes()
    assert checkpoint.read("a.weight", 2, 5).tolist() == [2, 3, 4]


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    parts = (np.full(2, value, np.float32) for value in (1, 2, 3))
    write_tensors(tmp_path / "x.safetensors", {**TENSORS, "streamed": ("F32", (3, 2), parts)})
    loaded = load_file(tmp_path / "x.safetensors")
    assert set(loaded) == {*TENSORS, "streamed"}
    for name, expected in TENSORS.items():
        np.testing.assert_array_equal(loaded[name], expected)
    assert loaded["streamed"].tolist() == [[1, 1], [2, 2], [3, 3]]
    assert Checkpoint.open(tmp_path / "x.safetensors").metadata == ({"format": "pt"},)


def test_bfloat16_is_read_exactly(tmp_path: Path) -> None:
    values = torch.randn(5, 7).to(torch.bfloat16)
    save_torch({"w": values}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.dtype("w") == "BF16"
    np.testing.assert_array_equal(checkpoint.numpy("w"), values.float().numpy())


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(width=32), min_size=1, max_size=20))
def test_bfloat16_rounds_as_torch_does(numbers: list[float]) -> None:
    values = np.array(numbers, dtype=np.float32)
    ours = decode(encode(values, "BF16"), "BF16")
    np.testing.assert_array_equal(ours, torch.from_numpy(values).to(torch.bfloat16).float().numpy())


def test_written_bfloat16_is_torchs(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(3, 4))
    write_tensors(tmp_path / "x.safetensors", {"w": ("BF16", (3, 4), iter([encode(values, "BF16")]))})
    loaded = load_torch(tmp_path / "x.safetensors")["w"]
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(loaded, torch.from_numpy(values).float().to(torch.bfloat16))


def test_what_is_written_is_hashed_and_may_be_written_over(tmp_path: Path) -> None:
    """Pieces that fit no buffer, and one array for all of them, as a kernel reuses it."""
    sizes = [1, 200_000, 0, 131_072, 7, 1_300_001]
    values = np.random.default_rng(0).normal(size=sum(sizes)).astype(np.float32)

    def pieces() -> Iterator[np.ndarray]:
        same = np.empty(max(sizes), np.float32)
        start = 0
        for size in sizes:
            same[:size] = values[start : start + size]
            start += size
            yield same[:size]

    given = {"w": ("F32", values.shape, pieces()), "x": np.array(3.0), "y": np.empty((0, 2), np.float32)}
    path = tmp_path / "x.safetensors"
    assert write_tensors(path, given) == "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest()
    loaded = load_file(path)
    np.testing.assert_array_equal(loaded["w"], values)
    assert (loaded["x"], loaded["x"].shape, loaded["y"].shape) == (3, (), (0, 2))


def test_the_thread_that_writes_says_what_went_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shards, "_send", full)
    computed: list[int] = []

    def pieces() -> Iterator[np.ndarray]:
        for number in range(40):
            computed.append(number)
            yield np.zeros(1 << 18, np.float32)

    with pytest.raises(OSError, match="No space left"):
        write_tensors(tmp_path / "x.safetensors", {"w": ("F32", (40 << 18,), pieces())})
    assert len(computed) < 40  # it stops soon after


def test_shards(tmp_path: Path) -> None:
    save_file({"a": TENSORS["a.weight"]}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"c": TENSORS["c"]}, tmp_path / "model-00002-of-00002.safetensors")
    placed = {"a": "model-00001-of-00002.safetensors", "c": "model-00002-of-00002.safetensors"}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.names == ("a", "c")
    np.testing.assert_array_equal(checkpoint.numpy("c"), TENSORS["c"])
    index.write_text(json.dumps({"weight_map": {**placed, "lost": placed["a"]}}))
    with pytest.raises(ModelError, match="tensor lost"):
        Checkpoint.open(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "../elsewhere.safetensors"}}))
    with pytest.raises(ModelError, match="beside it"):
        Checkpoint.open(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "model-00003-of-00002.safetensors"}}))
    with pytest.raises(ModelError, match="missing"):
        Checkpoint.open(tmp_path)


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file(TENSORS, file)
    whole = file.read_bytes()
    for length in [0, 4, 8, 20, len(whole) // 2, len(whole) - 1]:
        file.write_bytes(whole[:length])
        with pytest.raises(ModelError, match="truncated"):
            Checkpoint.open(tmp_path)
    file.write_bytes(whole + b"hidden")
    with pytest.raises(ModelError, match="6 bytes that belong to no tensor"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}, "doesn't fit"),
        ({"dtype": "F99", "shape": [2], "data_offsets": [0, 8]}, "dtype F99"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}, "belong to no tensor"),
        ({"dtype": "F32", "shape": [2]}, "can't be read"),
        ("nonsense", "can't be read"),
    ],
)
def test_malformed_headers(tmp_path: Path, entry: object, message: str) -> None:
    header = json.dumps({"w": entry}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(ModelError, match=message):
        Checkpoint.open(file)


def test_a_pickle_is_refused_with_the_command_that_converts_it(tmp_path: Path) -> None:
    file = tmp_path / "pytorch_model.bin"
    torch.save({"w": torch.ones(2), "v": torch.zeros(3)}, file)
    for path in (tmp_path, file):
        with pytest.raises(ModelError, match="pickle checkpoint") as caught:
            Checkpoint.open(path)
    command = str(caught.value).split('python -c "')[1].removesuffix('"')
    exec(command, {})
    assert Checkpoint.open(tmp_path).names == ("v", "w")


def test_missing_weights(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="holds no weights"):
        Checkpoint.open(tmp_path)
    with pytest.raises(ModelError, match="doesn't exist"):
        Checkpoint.open(tmp_path / "nowhere")


def test_a_stream_of_the_wrong_length_or_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="tensor w"):
        write_tensors(tmp_path / "x", {"w": ("F32", (3,), iter([np.zeros(2, np.float32)]))})
    with pytest.raises(ModelError, match="tensor w"):
        write_tensors(tmp_path / "x", {"w": ("F32", (3,), iter([np.zeros(3, np.float64)]))})
