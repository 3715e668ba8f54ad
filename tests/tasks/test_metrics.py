import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, mean_squared_error

from confide.errors import ConfigError, DataError
from confide.tasks.metrics import in_words, score

pairs = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=50)


@given(pairs)
@settings(deadline=None)
def test_agrees_with_scikit_learn(rows: list[tuple[int, int]]) -> None:
    predictions, labels = np.array(rows).T
    assert score("accuracy", predictions, labels) == pytest.approx(
        accuracy_score(labels, predictions), abs=1e-12
    )
    expected = f1_score(labels, predictions, average="macro", zero_division=0)
    assert score("macro-f1", predictions, labels) == pytest.approx(expected, abs=1e-12)


@given(st.lists(st.tuples(st.integers(-9, 9), st.integers(-9, 9)), min_size=2, max_size=40))
@settings(deadline=None)
def test_numbers_agree_with_scipy(rows: list[tuple[int, int]]) -> None:
    predictions, labels = np.array(rows, dtype=np.float64).T / 4
    constant = len(set(predictions)) == 1 or len(set(labels)) == 1
    for metric, oracle in (("pearson", pearsonr), ("spearman", spearmanr)):
        expected = 0.0 if constant else oracle(predictions, labels).statistic
        assert score(metric, predictions, labels) == pytest.approx(expected, abs=1e-9)  # type: ignore[arg-type]
    expected = mean_squared_error(labels, predictions) ** 0.5
    assert score("rmse", predictions, labels) == pytest.approx(expected, abs=1e-12)


def test_in_words() -> None:
    assert in_words("macro-f1", 0.875) == "macro-f1 87.5 %"
    assert in_words("rmse", 12.34567) == "rmse 12.35"
    assert in_words("perplexity", 12.34567) == "perplexity 12.35"


def test_bounds() -> None:
    labels = np.array([0, 1, 2])
    for metric in ("accuracy", "macro-f1"):
        assert score(metric, labels, labels) == 1.0
        assert score(metric, (labels + 1) % 3, labels) == 0.0


def test_bad_input() -> None:
    with pytest.raises(ConfigError, match="'f1'; use one of accuracy, macro-f1"):
        score("f1", np.array([0]), np.array([0]))  # type: ignore[arg-type]
    for predictions, labels in (([], []), ([0, 1], [0]), ([[0]], [[0]])):
        with pytest.raises(DataError, match="can't be scored"):
            score("accuracy", np.array(predictions), np.array(labels))
