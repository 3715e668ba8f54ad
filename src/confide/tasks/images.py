"""Images: every file is opened and checked when records are read, and resized once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from confide.errors import DataError

Pixels = npt.NDArray[np.uint8]

SIZE = 224
MOST_PIXELS = 100_000_000
CACHE_BYTES = 4 * 2**30
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM")  # none that starts a program, as EPS does


@dataclass(frozen=True, eq=False)
class Images:
    """Square RGB images of one size.

    Attributes:
        files: one per image.
        size: side in pixels.
        pixels: (images, size, size, 3), kept in memory if all fit into `CACHE_BYTES`; None where they are
            read from the files again whenever they are drawn.
    """

    files: tuple[Path, ...]
    size: int
    pixels: Pixels | None

    def __len__(self) -> int:
        return len(self.files)

    @classmethod
    def open(cls, files: Sequence[Path], size: int, cache_bytes: int = CACHE_BYTES) -> Images:
        """Open all files.

        Raises:
            DataError: no image, a damaged or huge one; the message names the file.
        """
        if size < 1:
            raise DataError(f"the image size is {size}; it is the side in pixels, at least 1")
        keep = len(files) * size * size * 3 <= cache_bytes
        pixels = np.empty((len(files) if keep else 0, size, size, 3), dtype=np.uint8)
        for number, file in enumerate(files):
            image = decode(file, size)
            if keep:
                pixels[number] = image
        return cls(tuple(files), size, pixels if keep else None)

    def read(self, rows: npt.NDArray[np.int64]) -> Pixels:
        """(len(rows), size, size, 3)."""
        if self.pixels is not None:
            return self.pixels[rows]
        return np.stack([decode(self.files[row], self.size) for row in rows])

    def take(self, rows: npt.NDArray[np.int64]) -> Images:
        """The given images, in the given order."""
        pixels = None if self.pixels is None else self.pixels[rows]
        return Images(tuple(self.files[row] for row in rows), self.size, pixels)


def decode(file: Path, size: int) -> Pixels:
    """One image as (size, size, 3): upright, without transparency, resized (bicubic) whatever its shape.

    Raises:
        DataError: not an image of a known format, damaged, or of more than `MOST_PIXELS`.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(file, formats=_FORMATS) as image:
            if image.width * image.height > MOST_PIXELS:
                raise DataError(
                    f"{file} has {image.width} × {image.height} pixels, "
                    f"more than {MOST_PIXELS:,}; make it smaller"
                )
            upright = ImageOps.exif_transpose(image).convert("RGB")
            resized = upright.resize((size, size), Image.Resampling.BICUBIC)
    except FileNotFoundError:
        raise DataError(f"there is no file {file}; check the path") from None
    except DataError:
        raise
    except Exception as error:  # every format has its own ways of being damaged
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{file} can't be read as an image ({reason}); replace it or drop it") from error
    return np.asarray(resized, dtype=np.uint8)
