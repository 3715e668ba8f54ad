"""The model card: what a release is and what its claim means, in words. Nothing here looks at records."""

from __future__ import annotations

import json
import re

from confide.privacy.events import PoissonGaussian, leaves
from confide.privacy.statement import Claim, Spending, Statement
from confide.privacy.words import round_up
from confide.release.format import Head, ReleaseInfo

FILE_NAME = "README.md"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def render(info: ReleaseInfo, statement: Statement) -> str:
    """The card of a release, as Hugging Face reads it: YAML front matter, then Markdown.

    Every word follows from the release format and the statement, so the card reveals nothing that they
    don't.
    """
    merged = info.kind == "merged"
    tasks = ", ".join(head.task for head in info.heads)
    parts = [
        _front_matter(info, statement),
        f"# {'Merged encoder' if merged else 'Classifier'}: {tasks}",
        _what(info, statement),
        "## Labels\n\n" + "\n".join(_labels(head) for head in info.heads),
        "## How to load it\n\n" + (_load_merged(info.heads[0]) if merged else _load_model()),
        "## Privacy\n\n" + _claim(statement),
        "## Licence\n\nUnknown: ask whoever made this release. The base model's licence applies too.",
    ]
    return "\n\n".join(parts) + "\n"


def _front_matter(info: ReleaseInfo, statement: Statement) -> str:
    lines = [
        "---",
        "library_name: transformers",
        f"pipeline_tag: {'feature-extraction' if info.kind == 'merged' else 'text-classification'}",
        "license: unknown",
    ]
    if _HUB_NAME.fullmatch(statement.base.name):
        lines.append(f"base_model: {statement.base.name}")
        lines.append(f"base_model_relation: {'merge' if info.kind == 'merged' else 'finetune'}")
    lines += ["tags:", "- confide"]
    lines += ["- merge"] if info.kind == "merged" else []
    lines += ["- differential-privacy"] if statement.claim else []
    return "\n".join([*lines, "---"])


def _what(info: ReleaseInfo, statement: Statement) -> str:
    base = f"`{statement.base.name}` (encoder `{statement.base.hash}`)"
    if info.kind == "merged":
        return (
            f"One encoder merged from models that were fine-tuned from {base}, and a head for each of "
            f"{_count(len(info.heads), 'task')}. `merge-report.json` has a line for every tensor."
        )
    if statement.kind == "merge":
        return (
            f"A text classifier for one task: a merge of models fine-tuned from {base}, made personal again."
        )
    return f"A text classifier, fine-tuned from {base}, for one task."


def _labels(head: Head) -> str:
    names = ", ".join(f"`{label}`" for label in head.labels)
    origin = {
        "declared": "declared by the owner of the data",
        "file": "read from the data; the set of labels is assumed to be public",
    }[head.labels_from]
    return (
        f"- **{head.task}**: {names}, in the order of the logits ({origin}); up to {head.max_length} tokens"
    )


def _load_model() -> str:
    return (
        "```python\n"
        "from transformers import AutoModelForSequenceClassification, AutoTokenizer\n\n"
        "model = AutoModelForSequenceClassification.from_pretrained(FOLDER)\n"
        "tokenizer = AutoTokenizer.from_pretrained(FOLDER)\n"
        "```\n\n"
        "or with confide, which also reads the claim:\n\n"
        "```\nconfide predict FOLDER --data new.csv\nconfide privacy show FOLDER\n```"
    )


def _load_merged(head: Head) -> str:
    return (
        "The encoder is a plain one:\n\n"
        "```python\n"
        "from transformers import AutoModel, AutoTokenizer\n\n"
        "encoder = AutoModel.from_pretrained(FOLDER)\n"
        "tokenizer = AutoTokenizer.from_pretrained(FOLDER)\n"
        "```\n\n"
        "With a task's head, plain transformers (the names in `heads/` are the classifier's own):\n\n"
        "```python\n"
        "from safetensors.torch import load_file\n"
        "from transformers import AutoModelForSequenceClassification\n\n"
        f"labels = {json.dumps(list(head.labels), ensure_ascii=False)}\n"
        "model = AutoModelForSequenceClassification.from_pretrained(FOLDER, num_labels=len(labels))\n"
        f'model.load_state_dict(load_file("FOLDER/heads/{head.task}/model.safetensors"), strict=False)\n'
        "```\n\n"
        "or confide:\n\n"
        f"```\nconfide evaluate FOLDER --task {head.task}\nconfide privacy show FOLDER\n```"
    )


def _claim(statement: Statement) -> str:
    if statement.claim is None:
        reason = statement.no_claim or "no reason is given"
        return (
            f"**Nothing is claimed for these weights**: {reason.rstrip('.')}. They may reveal the records "
            "that they were trained on."
        )
    return "\n\n".join(
        [
            _promise(statement.claim, statement),
            "Trained on:\n\n" + "\n".join(_spending(spending) for spending in statement.spendings),
            "**Not protected**: the base model's own training data; the choice of hyper-parameters, names of "
            "data sets, their declared sizes and labels, which are public; anything that is true of the "
            "population and not of one unit; what somebody learns by other ways than this release.",
            "Under these assumptions:\n\n" + "\n".join(f"- {line}" for line in statement.assumptions)
            if statement.assumptions
            else "No further assumptions.",
            "`confide privacy show FOLDER` recomputes the claim from `statement.json`.",
        ]
    )


def _promise(claim: Claim, statement: Statement) -> str:
    units = " or ".join(sorted({f"one {spending.unit}" for spending in statement.spendings})) or "one record"
    adjacency = {spending.adjacency for spending in statement.spendings}
    change = "replaced by another" if adjacency == {"replace-one"} else "added or removed"
    shared, renyi = "", round_up(claim.epsilon_rdp, 4)
    if statement.kind == "merge" and len({spending.dataset for spending in statement.spendings}) > 1:
        shared = (
            " The data sets were declared to share no unit, so each unit is in one of them; if that "
            "is wrong, the claim is too small."
            if statement.disjoint
            else " Nobody declared that the data sets share no unit, so what was spent on each is added up."
        )
    return (
        f"**ε = {round_up(claim.epsilon, 4)}, δ = {round_up(claim.delta, 3)}.** Whether {units} was {change} "
        "changes the probability of any outcome of the training by at most a factor e^ε, up to δ. That holds "
        "against anybody who has these weights, whatever else they know and however much they compute. It is "
        f"an upper bound ({claim.accountant}); the Rényi bound at the same δ is {renyi}.{shared}"
    )


def _spending(spending: Spending) -> str:
    unit = "records" if spending.unit == "record" else f"units (values of `{spending.unit}`)"
    if spending.event is None:
        return f"- `{spending.dataset}`, {spending.units} {unit}: {spending.no_claim or 'no claim'}"
    queries = sum(event.steps * len(event.noise_multipliers) for event in _gaussians(spending))
    return (
        f"- `{spending.dataset}`, {spending.units} {unit} ({spending.adjacency.replace('-', ' ')}): "
        f"{_count(queries, 'noisy query', 'noisy queries')} on random minibatches"
    )


def _gaussians(spending: Spending) -> tuple[PoissonGaussian, ...]:
    return leaves(spending.event) if spending.event else ()


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
