"""Images: decoded as transformers does, bad files found by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from confide.errors import DataError
from confide.release.format import preprocessor
from confide.tasks import images
from confide.tasks.images import Images, decode
from confide.tasks.text import Normalised

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)


def save(path: Path, mode: str = "RGB", size: tuple[int, int] = (20, 13), **options: object) -> Path:
    bands = len(Image.new(mode, (1, 1)).getbands())
    pixels = np.random.default_rng(len(path.name)).integers(0, 256, (size[1], size[0], bands), dtype=np.uint8)
    Image.fromarray(pixels.squeeze(), mode).save(path, **options)
    return path


@pytest.mark.parametrize(("mode", "suffix"), [("RGB", "png"), ("L", "png"), ("RGBA", "png"), ("RGB", "jpg")])
def test_pixels_are_what_transformers_makes_of_the_file(tmp_path: Path, mode: str, suffix: str) -> None:
    from transformers.image_utils import load_image
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    file = save(tmp_path / f"one.{suffix}", mode)
    config = preprocessor({"image_mean": MEAN, "image_std": STD}, 28)
    config.pop("image_processor_type")
    expected = ViTImageProcessorPil(**config)(load_image(str(file)), return_tensors="np")["pixel_values"]
    found = Normalised(Images.open([file], 28), MEAN, STD, 17).batch(np.array([0]))["pixel_values"]
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-5)


def test_rotated_photographs_stand_upright(tmp_path: Path) -> None:
    turned = Image.Exif()
    turned[0x0112] = 6
    file = save(tmp_path / "a.png", exif=turned)
    plain = np.asarray(Image.open(file))
    expected = Image.fromarray(np.rot90(plain, -1)).resize((8, 8), Image.Resampling.BICUBIC)
    np.testing.assert_array_equal(decode(file, 8), np.asarray(expected))


def test_what_does_not_fit_in_memory_is_read_again(tmp_path: Path) -> None:
    files = [save(tmp_path / f"{'x' * number}.png") for number in range(1, 5)]
    kept = Images.open(files, 10, cache_bytes=4 * 300)
    read = Images.open(files, 10, cache_bytes=4 * 300 - 1)
    assert kept.pixels is not None
    assert read.pixels is None
    rows = np.array([2, 0])
    np.testing.assert_array_equal(kept.read(rows), read.read(rows))
    np.testing.assert_array_equal(kept.take(rows).read(np.array([1])), read.take(rows).read(np.array([1])))
    assert len({kept.read(np.array([row])).tobytes() for row in range(4)}) == 4


def test_bad_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = save(tmp_path / "good.png", size=(200, 200))
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "cut.png").write_bytes(good.read_bytes()[:3000])
    (tmp_path / "program.eps").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    for name in ("text.png", "cut.png", "program.eps"):
        with pytest.raises(DataError, match=f"{name} can't be read as an image"):
            Images.open([good, tmp_path / name], 8)
    with pytest.raises(DataError, match=r"no file .*nothing\.png"):
        decode(tmp_path / "nothing.png", 8)
    with pytest.raises(DataError, match="image size is 0"):
        Images.open([good], 0)
    monkeypatch.setattr(images, "MOST_PIXELS", 39_999)
    with pytest.raises(DataError, match=r"good\.png has 200 × 200 pixels"):
        decode(good, 8)
