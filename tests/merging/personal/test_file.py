from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from confide.errors import ConfideError, MergeError, ModelError, PrivacyError
from confide.merging.personal import file
from confide.merging.personal.pack import pack

Contents = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def packed(merged: Path, releases: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packed") / "films.personal"
    pack(merged, releases[0], out=path, budget=0.08)
    return path


def rewritten(packed: Path, path: Path, change: Callable[[dict[str, Any], Contents], None]) -> Path:
    """The file with its description or payloads changed and the hash made right again: a forgery."""
    contents = load_file(packed)
    about = json.loads(zlib.decompress(contents.pop("about").tobytes()))
    change(about, contents)
    text = json.dumps(about, separators=(",", ":"), ensure_ascii=False).encode()
    contents["about"] = np.frombuffer(zlib.compress(text), np.uint8)
    try:
        parsed = file.About.model_validate(about)
    except ValueError:
        pass
    else:
        raw = {n: memoryview(np.ascontiguousarray(v)).cast("B") for n, v in contents.items() if n != "about"}
        parsed = file._with_hash(parsed, file._content(parsed, raw))
        contents["about"] = np.frombuffer(parsed.packed(), np.uint8)
    save_file(contents, path, metadata={"format": "pt"})
    return path


def test_round_trip(packed: Path, tmp_path: Path) -> None:
    read = file.read(packed)
    coded = [one for layers in read.layers.values() for one in layers]
    again = file.write(tmp_path / "again", read.about, coded, read.heads)
    assert again == read.about
    assert (tmp_path / "again").read_bytes() == packed.read_bytes()
    # A forgery that changes nothing is the file itself, so the helper forges well.
    same = file.read(rewritten(packed, tmp_path / "same", lambda about, contents: None))
    assert same.about == read.about


def test_two_bits_an_entry(packed: Path) -> None:
    parts = file.read(packed).about.parts
    entries = sum(sum(part.coded) for part in parts)
    lists = sum(len(part.coded) for part in parts)
    assert 0 <= 4 * load_file(packed)["codes"].size - entries <= 3 * lists


def test_any_changed_byte_is_noticed(packed: Path, tmp_path: Path) -> None:
    content = bytearray(packed.read_bytes())
    bad = tmp_path / "bad"
    for place in range(0, len(content), 97):
        content[place] ^= 1
        bad.write_bytes(content)
        with pytest.raises(ConfideError):
            file.read(bad)
        content[place] ^= 1
    for length in (0, 5, 200, len(content) // 2, len(content) - 1):
        bad.write_bytes(content[:length])
        with pytest.raises(ModelError, match=r"truncated|not a safetensors"):
            file.read(bad)
    bad.write_bytes(content + b"x")
    with pytest.raises(ModelError, match="belong to no tensor"):
        file.read(bad)


def drop(name: str) -> Callable[[dict[str, Any], Contents], None]:
    return lambda about, contents: contents.pop(name)  # type: ignore[return-value]


def set_part(**fields: Any) -> Callable[[dict[str, Any], Contents], None]:
    return lambda about, contents: about["parts"][0].update(fields)


def put(name: str, value: Any) -> Callable[[dict[str, Any], Contents], None]:
    def change(about: dict[str, Any], contents: Contents) -> None:
        contents[name] = contents[name].copy()
        contents[name].reshape(-1)[0] = value

    return change


def two_shapes(about: dict[str, Any], contents: Contents) -> None:
    last = about["parts"][-1]
    about["parts"].append(last | {"shape": [last["shape"][0] + 1, *last["shape"][1:]]})


def cheaper(about: dict[str, Any], contents: Contents) -> None:
    about["statement"]["claim"]["epsilon"] /= 2


@pytest.mark.parametrize(
    ("change", "kind", "pattern"),
    [
        (lambda a, c: a.update(format="confide.personal/2"), MergeError, "confide.personal/2.*reads.*/1"),
        (lambda a, c: a.update(colour="red"), MergeError, "colour"),
        (lambda a, c: a.pop("merge"), MergeError, "merge"),
        (lambda a, c: a["parts"].reverse(), MergeError, "sorted"),
        (lambda a, c: a["parts"].append(a["parts"][-1]), MergeError, "doesn't fit the ranks"),
        (two_shapes, MergeError, "different shapes"),
        (set_part(rows=10**6), MergeError, "rows"),
        (set_part(shape=[-1, 3]), MergeError, "parts.0"),
        (lambda a, c: a["parts"].pop(), MergeError, "doesn't fit the ranks"),
        (drop("codes"), MergeError, "codes"),
        (drop("head.classifier.bias"), MergeError, "classifier.bias"),
        (lambda a, c: c.update(more=np.zeros(3)), MergeError, "more"),
        (put("scales", np.nan), MergeError, "scales.*finite"),
        (put("values", np.inf), MergeError, "values.*finite"),
        (put("head.classifier.weight", np.nan), MergeError, "classifier.weight.*finite"),
        (put("bitmap", 255), MergeError, "bitmap of"),
        (lambda a, c: c.update(scales=c["scales"].astype(np.float64)), MergeError, "scales"),
        (cheaper, PrivacyError, "doesn't hold"),
    ],
)
def test_forgeries(
    packed: Path,
    tmp_path: Path,
    change: Callable[[dict[str, Any], Contents], None],
    kind: type[ConfideError],
    pattern: str,
) -> None:
    with pytest.raises(kind, match=pattern) as caught:
        file.read(rewritten(packed, tmp_path / "forged", change))
    if kind is MergeError:
        assert str(tmp_path / "forged") in str(caught.value)


def test_what_is_no_personal_file(merged: Path, tmp_path: Path) -> None:
    with pytest.raises(MergeError, match="folder"):
        file.read(merged)
    with pytest.raises(MergeError, match="not a personal file"):
        file.read(merged / "model.safetensors")
    with pytest.raises(ModelError, match="doesn't exist"):
        file.read(tmp_path / "nowhere")
    (tmp_path / "a.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match="pickle"):
        file.read(tmp_path / "a.bin")
    save_file({"about": np.frombuffer(b"not json", np.uint8)}, tmp_path / "odd", metadata={"format": "pt"})
    with pytest.raises(MergeError, match="JSON"):
        file.read(tmp_path / "odd")
    save_file(
        {"about": np.frombuffer(zlib.compress(b"[1]"), np.uint8)},
        tmp_path / "list",
        metadata={"format": "pt"},
    )
    with pytest.raises(MergeError, match="no valid personal file"):
        file.read(tmp_path / "list")
