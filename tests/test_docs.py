"""The guide and the README say what the code does: commands, links, snippets, keys and defaults."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

import confide
from confide.cli.main import app
from confide.cli.train import train as train_command
from confide.experiment.plan import Plan, TaskPlan, Upcycling, read
from confide.finetune.expert_settings import ExpertSettings
from confide.finetune.settings import Settings
from confide.merging.assign import groups_of
from confide.merging.operators import OPERATORS
from confide.merging.recipe import read as read_recipe
from confide.privacy.statement import Statement
from confide.report.study import Row
from confide.tasks.registry import TASKS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.glob("*.md")), *([ROOT / "README.md"] if (ROOT / "README.md").exists() else [])]
COMMAND: Any = typer.main.get_command(app)

_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def blocks(text: str, *languages: str) -> list[str]:
    """Contents of the fenced blocks in these languages, without their indentation."""
    return [textwrap.dedent(body) for _, language, body in _FENCE.findall(text) if language in languages]


def prose(text: str) -> str:
    """The page without its fenced blocks."""
    return _FENCE.sub("", text)


def command_lines(text: str) -> list[str]:
    """Whole `confide …` lines of the fenced blocks, continuations joined and prompts dropped."""
    lines = "\n".join(blocks(text, "", "sh", "bash", "console", "text")).replace("\\\n", " ").splitlines()
    return [line.removeprefix("$ ") for line in lines if line.removeprefix("$ ").startswith("confide ")]


def spans(text: str) -> list[str]:
    """`confide …` in running text."""
    return [span for span in _SPAN.findall(prose(text)) if span.startswith("confide ")]


def find(line: str) -> tuple[Any, list[str]]:
    """The command that a line names, and its arguments.

    Raises:
        LookupError: no such command.
    """
    words = shlex.split(line, comments=True)[1:]
    while words and words[0] in ("--debug",):
        words = words[1:]
    command = COMMAND
    while words and hasattr(command, "commands"):
        if words[0].startswith("-"):
            break
        if words[0] not in command.commands:
            raise LookupError(f"there is no command {words[0]!r} in: {line}")
        command, words = command.commands[words[0]], words[1:]
    return command, words


def check_whole(line: str) -> None:
    """A command line that somebody may paste: it parses, nothing runs."""
    command, words = find(line)
    command.make_context("confide", list(words))


def check_mention(line: str) -> None:
    """A command that is only mentioned: its name and options exist."""
    command, words = find(line)
    known = {option for parameter in command.params for option in parameter.opts} | {"--help", "--debug"}
    for word in words:
        if word.startswith("--") and word.split("=")[0] not in known:
            raise LookupError(f"there is no option {word} in: {line}")


def slug(heading: str) -> str:
    """The anchor that a Markdown page gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    text = prose(page.read_text(encoding="utf-8"))
    return {slug(heading) for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}


def broken_links(page: Path) -> list[str]:
    broken = []
    for target in _LINK.findall(prose(page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        missing = not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file))
        broken += [target] if missing else []
    return broken


def table(page: Path, heading: str) -> dict[str, str]:
    """First and second column of the table under a heading; a row of several names becomes several."""
    text = page.read_text(encoding="utf-8").split(f"\n{heading}\n", 1)[1]
    rows: dict[str, str] = {}
    started = False
    for line in text.splitlines():
        if line.startswith("|"):
            started = True
            first, second = (cell.strip() for cell in line.strip("|").split("|")[:2])
            names = re.findall(r"`([^`]+)`", first)
            values = [value.strip() for value in second.split(",", len(names) - 1)] if names else []
            values = values if len(values) == len(names) else [second] * len(names)
            rows |= dict(zip(names, values, strict=True))
        elif started:
            break
    return rows


def each(extract: Any) -> Iterator[Any]:
    for page in PAGES:
        for number, item in enumerate(extract(page.read_text(encoding="utf-8"))):
            yield pytest.param(item, id=f"{page.stem}-{number}")


@pytest.mark.parametrize("line", each(command_lines))
def test_command_parses(line: str) -> None:
    check_whole(line)


@pytest.mark.parametrize("line", each(spans))
def test_mentioned_command_exists(line: str) -> None:
    check_mention(line)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_resolve(page: Path) -> None:
    assert broken_links(page) == []


def test_index_names_every_page() -> None:
    linked = set(_LINK.findall((DOCS / "index.md").read_text(encoding="utf-8")))
    assert {page.name for page in DOCS.glob("*.md")} - {"index.md"} <= linked


@pytest.mark.parametrize("code", each(lambda text: blocks(text, "python", "py")))
def test_python_compiles_and_uses_the_api(code: str) -> None:
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "confide"
        ):
            assert node.attr in confide.__all__, node.attr
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "confide.train":
            keywords = {keyword.arg for keyword in node.keywords}
            assert keywords <= {*Settings.model_fields, "base", "dataset", "checkpoint"}


@pytest.mark.parametrize("text", each(lambda text: blocks(text, "yaml", "yml")))
def test_yaml_is_a_study_or_a_part_of_one(text: str, tmp_path: Path) -> None:
    content = yaml.safe_load(text)
    if "merge_method" in content:
        file = tmp_path / "recipe.yaml"
        file.write_text(text, encoding="utf-8")
        groups_of(read_recipe(file), ("encoder.layer.0.attention.weight",), "")
        return
    if {"base", "tasks"} <= content.keys():
        file = tmp_path / "study.yaml"
        file.write_text(text, encoding="utf-8")
        read(file)
        if "fast" in content:
            read(file, fast=True)
        return
    assert content.keys() <= {*Plan.model_fields, "fast"}
    whole = {"title": "part", "base": "base", "tasks": [{"name": "imdb"}], "methods": {"dp-adamw": {}}}
    plan = Plan.model_validate({**whole, **content})
    for method in plan.methods:
        plan.settings_of(method, 0)


def test_settings_table_has_every_key_and_default() -> None:
    rows = table(DOCS / "study.md", "## settings")
    assert rows.keys() == Settings.model_fields.keys()
    for name, field in Settings.model_fields.items():
        default = field.default
        if name == "trainable":
            text = next(
                line
                for line in (DOCS / "study.md").read_text(encoding="utf-8").splitlines()
                if line.startswith("| `trainable`")
            )
            assert rows[name] == "LoRA"
            assert default.kind == "lora"
            for key, value in default.model_dump().items():
                shown = (
                    f"[{', '.join(value)}]"
                    if isinstance(value, tuple)
                    else str(value).lower()
                    if isinstance(value, bool)
                    else f"{value:g}"
                    if isinstance(value, float)
                    else str(value)
                )
                assert f"`{key}`: {shown}" in text or (key == "kind" and f"`{key}`: `{value}`" in text), key
        elif name == "experts":
            assert table(DOCS / "study.md", "## experts").keys() == ExpertSettings.model_fields.keys()
        else:
            assert rows[name].strip("`") == ("none" if default is None else str(default)), name
    for name, value in table(DOCS / "study.md", "## experts").items():
        default = ExpertSettings.model_fields[name].default
        shown = str(default).lower() if isinstance(default, bool) else str(default)
        assert value.strip("`") == ("none" if default is None else shown), name


def test_study_tables_have_every_key() -> None:
    page = DOCS / "study.md"
    assert table(page, "## Top level").keys() == {*Plan.model_fields, "fast"}
    assert table(page, "## upcycle").keys() == Upcycling.model_fields.keys()
    assert table(page, "## tasks").keys() == TaskPlan.model_fields.keys()
    assert table(page, "## What comes out").keys() == set(Row.__dataclass_fields__)


def test_option_table_has_every_option_and_default() -> None:
    rows = table(DOCS / "own-data.md", "### Options: what to change first")
    command, _ = find("confide train")
    assert rows.keys() == {parameter.opts[0] for parameter in command.params} - {"--help"}
    for name, parameter in inspect.signature(train_command).parameters.items():
        option = "--" + name.replace("_", "-")
        shown = rows[option].strip("`")
        if parameter.default is inspect.Parameter.empty:
            assert shown == "required", option
        elif isinstance(parameter.default, bool):
            assert shown == "off", option
        elif parameter.default is not None:
            assert shown == str(parameter.default), option
        elif name in Settings.model_fields and Settings.model_fields[name].default is not None:
            assert shown == str(Settings.model_fields[name].default), option


def test_lists_of_names_are_whole() -> None:
    study = (DOCS / "study.md").read_text(encoding="utf-8")
    assert all(f"`{task}`" in study for task in TASKS)
    own = (DOCS / "own-data.md").read_text(encoding="utf-8")
    assert all(f"| `{operator}` |" in own for operator in OPERATORS)
    statement = table(DOCS / "promises.md", "## The statement, and how anyone checks it")
    assert statement.keys() <= Statement.model_fields.keys()


@pytest.mark.parametrize(
    "line",
    [
        "confide privacy epsilon --sampling-rate 0.01 --noise 1 --steps 10 --delta 1e-5",
        "confide privacy noise --epsilon 4",
        "confide train --method dp-sgd --base b --data d.csv --out o --dataset n",
        "confide bake cake",
    ],
)
def test_a_wrong_command_is_noticed(line: str) -> None:
    with pytest.raises(Exception, match=r"noise|Missing|[Oo]ption|not one of|no command"):
        check_whole(line)


def test_a_wrong_mention_is_noticed() -> None:
    with pytest.raises(LookupError, match="--epsilom"):
        check_mention("confide train --epsilom 3")


def test_a_broken_link_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A b, c?\n[here](#a-b-c) [not](#d) [gone](gone.md) [web](https://example.org)\n")
    assert broken_links(page) == ["#d", "gone.md"]


def test_commands_are_found_in_blocks() -> None:
    text = "```\n$ confide run a.yaml \\\n  --out b\nε = 1\n```\nand `confide merge` and `other`\n"
    assert command_lines(text) == ["confide run a.yaml    --out b"]
    assert spans(text) == ["confide merge"]
    assert len([line for page in PAGES for line in command_lines(page.read_text(encoding="utf-8"))]) > 10


def test_nothing_is_left_to_fill_in() -> None:
    for page in PAGES:
        assert "@@" not in page.read_text(encoding="utf-8"), page
