"""Which columns of a file hold what, and what its records are by them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from confide.errors import DataError
from confide.release.format import Problem


@dataclass(frozen=True)
class Columns:
    """Which column of a file holds what.

    Attributes:
        text: texts; the first ones, of pairs.
        label: labels: a class or a number, or a list of classes for `tokens`.
        text_pair: the second texts of pairs.
        tokens: lists of words, instead of texts.
        image: paths of images, instead of texts; from the file's own folder where they are relative.
        target: texts that a language model is to write for `text`.
        unit: whose row it is.
    """

    text: str = "text"
    label: str = "label"
    text_pair: str | None = None
    tokens: str | None = None
    image: str | None = None
    unit: str | None = None
    target: str | None = None

    @property
    def inputs(self) -> tuple[str, ...]:
        """The columns that a model reads."""
        if instead := self.image or self.tokens:
            return (instead,)
        second = self.text_pair or self.target
        return (self.text, second) if second else (self.text,)

    def fitting(self, problem: Problem) -> Columns:
        """These columns for what a model is known to read; what wasn't named has its usual name.

        Raises:
            DataError: it reads pairs, and the column of second texts isn't named.
        """
        if problem.target == "text":
            if problem.inputs == "pair" and self.target is None:
                raise DataError("this model answers texts; name the column of the answers (target)")
            own = self.target if problem.inputs == "pair" else None
            return replace(self, text_pair=None, tokens=None, image=None, target=own)
        if problem.inputs == "image":
            return replace(self, text_pair=None, tokens=None, image=self.image or "image")
        if problem.target == "tokens":
            return replace(self, text_pair=None, tokens=self.tokens or "tokens", image=None)
        if problem.inputs == "pair" and self.text_pair is None:
            raise DataError("this model reads pairs of texts; name the column of the second ones (text_pair)")
        return replace(
            self, text_pair=self.text_pair if problem.inputs == "pair" else None, tokens=None, image=None
        )


def problem_of(
    path: Path, columns: Columns, label_range: tuple[float, float] | None, image_size: int, writes: bool
) -> Problem:
    """What a file's records are, and what is said about them.

    Args:
        path: a file, or a folder of images.
        writes: whether a language model learns texts.

    Raises:
        DataError: what was named doesn't go together.
    """
    kinds = [n for n in ("text_pair", "tokens", "image", "target") if getattr(columns, n) is not None]
    if writes and columns.target is None:
        kinds.append("language_model")
    if len(kinds) > 1:
        raise DataError(
            f"{kinds[0]} and {kinds[1]} don't go together; a record is a text, a pair, words, an image, or "
            "what a language model learns"
        )
    if path.is_dir() and columns.unit:
        raise DataError(
            f"{path} is a folder, which can't say whose images are whose; list them in a CSV file"
        )
    if label_range is not None:
        if writes:
            raise DataError("a language model learns texts, not numbers; leave out the label range")
        if columns.tokens is not None or path.is_dir():
            raise DataError("a label range is for one number per row of a file; leave it out")
        if not -np.inf < label_range[0] < label_range[1] < np.inf:
            raise DataError(
                f"the label range is {label_range[0]:g} to {label_range[1]:g}; "
                "it goes from a lower to a higher number"
            )
    if image_size < 1:
        raise DataError(f"the image size is {image_size}; it is a side in pixels, at least 1")
    return Problem(
        inputs="image" if columns.image else "pair" if len(columns.inputs) == 2 else "text",
        target="text"
        if writes
        else "tokens"
        if columns.tokens
        else "class"
        if label_range is None
        else "number",
        label_range=label_range,
        image_size=image_size if columns.image else None,
    )
