from __future__ import annotations

import errno
import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from confide.errors import PrivacyError, ReleaseError
from confide.privacy import statement as statements
from confide.privacy.statement import Statement
from confide.release import format
from confide.release.format import ReleaseInfo
from confide.release.write import verify, write_release

Save = Callable[[Path], None]
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


@pytest.fixture
def release(tmp_path: Path, save: Save, info: ReleaseInfo, statement: Statement) -> Path:
    write_release(tmp_path / "release", save=save, info=info, statement=statement)
    return tmp_path / "release"


def test_what_is_written_is_read_back(release: Path, info: ReleaseInfo, statement: Statement) -> None:
    assert format.read(release) == info
    written = statements.read(release)
    digest = hashlib.sha256((release / "model.safetensors").read_bytes()).hexdigest()
    stated = {"weights": {"model.safetensors": f"sha256:{digest}"}, "files": written.files}
    assert written == statement.model_copy(update=stated)
    assert set(written.files) == {"README.md", "confide.json", "config.json", *TOKENIZER}
    assert verify(release) == written
    assert not list(release.parent.glob(".*"))


def test_plain_transformers_loads_it(release: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(release)
    assert model.config.id2label == {0: "neg", 1: "pos"}
    tokens = AutoTokenizer.from_pretrained(release)("good film", return_tensors="pt")
    assert tokens["input_ids"].tolist() == [[2, 5, 7, 3]]
    assert model(**tokens).logits.shape == (1, 2)


def test_altered_weights_are_noticed(release: Path) -> None:
    file = release / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(ReleaseError, match=r"model\.safetensors was changed"):
        verify(release)


def test_what_doesnt_belong_is_named(release: Path) -> None:
    (release / "losses.json").write_text("[]")
    (release / "heads" / "films").mkdir(parents=True)
    (release / "heads" / "films" / "notes.txt").write_text("")
    with pytest.raises(ReleaseError, match=r"heads/films/notes\.txt, losses\.json"):
        verify(release)


def test_missing_pieces(release: Path) -> None:
    extra = release / "model-00001-of-00001.safetensors"
    shutil.copy(release / "model.safetensors", extra)
    with pytest.raises(ReleaseError, match="says nothing about model-00001"):
        verify(release)
    (release / "model.safetensors").unlink()
    with pytest.raises(ReleaseError, match=r"about model\.safetensors, which is missing|says nothing"):
        verify(release)
    extra.unlink()
    with pytest.raises(ReleaseError, match="holds no weights"):
        verify(release)
    (release / "statement.json").unlink()
    with pytest.raises(PrivacyError, match="no statement"):
        verify(release)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t | {"secret": np.ones(3, np.float32)}, "tensor secret is neither"),
        (lambda t: {n: v for n, v in t.items() if n != "classifier.bias"}, r"classifier\.bias is missing"),
    ],
)
def test_tensors_that_dont_belong_or_are_missing(
    tmp_path: Path, save: Save, info: ReleaseInfo, statement: Statement, change: Callable, message: str
) -> None:
    def alter(folder: Path) -> None:
        save(folder)
        tensors = load_file(folder / "model.safetensors")
        save_file(change(tensors), folder / "model.safetensors")

    with pytest.raises(ReleaseError, match=message):
        write_release(tmp_path / "release", save=alter, info=info, statement=statement)
    assert not list(tmp_path.iterdir())


def test_metadata_is_no_way_out(tmp_path: Path, save: Save, info: ReleaseInfo, statement: Statement) -> None:
    def whisper(folder: Path) -> None:
        save(folder)
        tensors = load_file(folder / "model.safetensors")
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt", "loss": "0.1"})

    with pytest.raises(ReleaseError, match="metadata"):
        write_release(tmp_path / "release", save=whisper, info=info, statement=statement)


def test_an_undeclared_file_stops_the_release(
    tmp_path: Path, save: Save, info: ReleaseInfo, statement: Statement
) -> None:
    def leak(folder: Path) -> None:
        save(folder)
        (folder / "trainer_state.json").write_text("{}")

    with pytest.raises(ReleaseError, match=r"trainer_state\.json"):
        write_release(tmp_path / "release", save=leak, info=info, statement=statement)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("problem", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")])
def test_nothing_half_written(
    tmp_path: Path, save: Save, info: ReleaseInfo, statement: Statement, problem: BaseException
) -> None:
    def fail(folder: Path) -> None:
        save(folder)
        raise problem

    expected = ReleaseError if isinstance(problem, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        write_release(tmp_path / "release", save=fail, info=info, statement=statement)
    assert not list(tmp_path.iterdir())


def test_no_release_is_replaced_unasked(
    release: Path, save: Save, info: ReleaseInfo, statement: Statement
) -> None:
    with pytest.raises(ReleaseError, match="exists already"):
        write_release(release, save=save, info=info, statement=statement)
    write_release(release, save=save, info=info, statement=statement, overwrite=True)
    verify(release)


def test_a_task_name_must_name_a_folder(
    tmp_path: Path, save: Save, info: ReleaseInfo, statement: Statement
) -> None:
    head = info.heads[0].model_copy(update={"task": "../films"})
    bad = info.model_copy(update={"heads": (head,)})
    with pytest.raises(ReleaseError, match=r"\.\./films"):
        write_release(tmp_path / "release", save=save, info=bad, statement=statement)
