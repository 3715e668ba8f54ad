"""The report of a study: one page that asks nothing of the network, and the same facts as data."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from confide.errors import ConfigError
from confide.files import new_folder, write_json, write_text
from confide.report import figures
from confide.report.mixtures import (
    clipped_text,
    diagnostics_text,
    routing_text,
    routing_words,
    streams_text,
)
from confide.report.page import page
from confide.report.scores import INDIVIDUAL, score_table
from confide.report.study import MixtureFacts, Study
from confide.report.tables import Table, method_table, method_text, score_text


def write_report(study: Study, folder: Path, *, overwrite: bool = False) -> None:
    """Write `results.json` (the rows), `study.json` (every fact) and `report.html`, all or nothing.

    Args:
        study: what to report.
        folder: must not exist, unless `overwrite`; then it is replaced as a whole.

    Raises:
        ConfigError: a number that isn't finite, or rows that don't make a table.
        ReleaseError: `folder` exists, or can't be written.
    """
    page = report_html(study)
    with new_folder(Path(folder), overwrite=overwrite) as side:
        try:
            write_json(side / "results.json", study.results())
            write_json(side / "study.json", study.facts())
        except (TypeError, ValueError) as error:
            raise ConfigError(f"the study holds a value that JSON can't: {error}") from None
        write_text(side / "report.html", page)


def report_html(study: Study) -> str:
    """The page: findings first, then scores, figures, methods, tasks, the claim and the settings.

    Everything that comes from the study is escaped.

    Raises:
        ConfigError: as in `write_report`.
    """
    import yaml

    lines, methods = score_table(study.rows), method_table(study.methods, study.rows)
    mixture = study.mixture
    by_epsilon = figures.variants(lines, mixture.runs) if mixture else None
    charts = (
        by_epsilon,
        figures.task_scores(lines) if by_epsilon is None or len(study.tasks) > 1 else None,
        figures.merged_scores(lines),
        figures.merge_gaps(methods),
        figures.drifts(methods),
        _routing_chart(mixture) if mixture else None,
    )
    values: dict[str, Any] = {
        "study": study,
        "scores": score_text(lines),
        "operators": [line.operator for line in lines],
        "merged": any(line.operator != INDIVIDUAL for line in lines),
        "methods": method_text(methods),
        "charts": [chart for chart in charts if chart is not None],
        "settings": {
            method: yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
            for method, settings in study.settings.items()
        },
        "streams": streams_text(mixture.runs) if mixture else None,
        "routing": _routing(mixture) if mixture else None,
        "seeds": sorted({row.seed for row in study.rows}),
    }
    return page("report.html.j2", **values)


def write_private(study: Study, folder: Path) -> None:
    """Write what a study saw of training records without noise: `roles.json` and `roles.html`; nothing if it
    saw nothing.

    Raises:
        ReleaseError: `folder` can't be written.
    """
    if not study.private:
        return
    tables = (clipped_text(study.private), diagnostics_text(study.private))
    shown = page("private.html.j2", study=study, tables=[table for table in tables if table])
    write_json(folder / "roles.json", [dataclasses.asdict(run) for run in study.private], private=True)
    write_text(folder / "roles.html", shown, private=True)


def _routing(mixture: MixtureFacts) -> tuple[Table, tuple[str, ...]] | None:
    found = mixture.routing
    return (routing_text(found, found.chosen), routing_words(found)) if found else None


def _routing_chart(mixture: MixtureFacts) -> figures.Chart | None:
    found = mixture.routing
    return figures.owner_shares(found, [found.chosen]) if found else None
