"""The model card: what a release is and what its claim means, in words. Nothing here looks at records."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from confide.privacy.events import queries
from confide.privacy.meaning import ADVERSARY, NO_ADVERSARY, not_protected, promise
from confide.privacy.signature import fingerprint
from confide.privacy.statement import Claim, Spending, Statement
from confide.privacy.words import apart, publication, round_up
from confide.release.format import Head, Problem, ReleaseInfo
from confide.release.names import CLASSES

FILE_NAME = "README.md"
_TOKENIZER = ("tokenizer", "AutoTokenizer")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def render(
    info: ReleaseInfo,
    statement: Statement,
    signed_by: str | None = None,
    report: Mapping[str, Any] | None = None,
    family: str | None = None,
) -> str:
    """The card of a release, as Hugging Face reads it: YAML front matter, then Markdown.

    Every word follows from the release format, the statement, the public key that signs it, the family of the
    model (`model_type`), and (of a merge) the merge report, so the card reveals nothing that they don't.
    """
    merged = info.kind == "merged"
    tasks = ", ".join(head.task for head in info.heads)
    parts = [
        _front_matter(info, statement, report),
        f"# {'Merged encoder' if merged else 'Task model'}: {tasks}" if tasks else "# Merged model",
        _what(info, statement),
        *([_merge(report)] if report else []),
        *(["## Labels\n\n" + "\n".join(_labels(head) for head in info.heads)] if info.heads else []),
        *(["## Score\n\n" + "\n".join(map(publication, statement.published))] if statement.published else []),
        "## How to load it\n\n"
        + (_load_merged(info.heads) if merged else _load_model(info.only_head().problem, family)),
        "## Privacy\n\n" + _claim(statement, signed_by),
        "## Licence\n\nUnknown: ask whoever made this release. The base model's licence applies too.",
    ]
    return "\n\n".join(parts) + "\n"


def _front_matter(info: ReleaseInfo, statement: Statement, report: Mapping[str, Any] | None) -> str:
    lines = [
        "---",
        "library_name: transformers",
        f"pipeline_tag: {_pipeline(info)}",
        "license: unknown",
    ]
    if _HUB_NAME.fullmatch(statement.base.name):
        lines.append(f"base_model: {statement.base.name}")
        lines.append(f"base_model_relation: {'merge' if info.kind == 'merged' else 'finetune'}")
    lines += ["tags:", "- confide"]
    lines += ["- merge"] if info.kind == "merged" else []
    lines += ["- differential-privacy"] if statement.claim else []
    if report:
        told = {key: report[key] for key in ("operator", "parameters")}
        told["models"] = [model["tasks"] for model in report["models"]]
        lines.append(f"merge: {_yaml(told)}")
    if claim := statement.claim:
        lines.append(f"differential_privacy: {_yaml({'epsilon': claim.epsilon, 'delta': claim.delta})}")
    return "\n".join([*lines, "---"])


def _pipeline(info: ReleaseInfo) -> str:
    if info.kind == "merged":
        return "feature-extraction"
    problem = info.only_head().problem
    if problem.inputs == "image":
        return "image-classification"
    if problem.objective is not None:
        return _PIPELINES[problem.objective]
    return "token-classification" if problem.target == "tokens" else "text-classification"


_PIPELINES: Mapping[str, str] = {
    "causal": "text-generation",
    "seq2seq": "text2text-generation",
    "masked": "fill-mask",
}


def _yaml(value: Any) -> str:
    """JSON that YAML 1.1 reads as the same: it takes 1e-06, without a point, for text."""
    text = json.dumps(value, ensure_ascii=False)
    return re.sub(r"(?<=[ \[])(-?\d+)(e[-+]\d+)(?=[,\]}])", r"\1.0\2", text)


def _what(info: ReleaseInfo, statement: Statement) -> str:
    base = f"`{statement.base.name}` (encoder `{statement.base.hash}`)"
    if info.kind == "merged" and not info.heads:
        return f"One model merged from models that were fine-tuned from {base}."
    if info.kind == "merged":
        return (
            f"One encoder merged from models that were fine-tuned from {base}, and a head for each of "
            f"{_count(len(info.heads), 'task')}. `merge-report.json` has a line for every tensor."
        )
    if statement.kind == "merge":
        return f"A model for one task: a merge of models fine-tuned from {base}, made personal again."
    return f"A model for one task, fine-tuned from {base}. It reads {_reads(info.only_head())}."


def _reads(head: Head) -> str:
    if head.problem.target == "text":
        return "texts, and writes answers" if head.problem.inputs == "pair" else "texts, as a language model"
    match head.problem.inputs:
        case "image":
            return f"images, resized to {head.problem.image_size} × {head.problem.image_size} pixels"
        case "pair":
            return "pairs of texts"
        case "text":
            return "lists of words" if head.problem.target == "tokens" else "texts"


def _merge(report: Mapping[str, Any]) -> str:
    settings = ", ".join(f"{key} {json.dumps(value)}" for key, value in report["parameters"].items())
    merged = [line for line in report["tensors"] if not line["rule"].startswith(("base:", "buffer:"))]
    lines = [
        f"Operator `{report['operator']}`{' with ' + settings if settings else ''} ({report['paper']}). It "
        f"made {len(merged)} of {len(report['tensors'])} tensors; the others are the base's.",
        *(f"- {model['tasks']} ({model['kind']})" for model in report["models"]),
    ]
    if weighed := report.get("statistics"):
        origins = sorted({f"{each['origin']} {each['kind']}" for each in weighed})
        sources = ", ".join(dict.fromkeys(each["source"] for each in weighed))
        lines.append(f"\nIt weighs the models by {' and '.join(origins)}, of: {sources}.")
    return "## What was merged\n\n" + "\n".join([lines[0], "", *lines[1:]])


def _labels(head: Head) -> str:
    if head.problem.label_range:
        low, high = head.problem.label_range
        return f"- **{head.task}**: a number; labels were declared to lie between {low:g} and {high:g}"
    if head.problem.target == "text":
        return f"- **{head.task}**: {_reads(head)}; up to {head.max_length} tokens"
    if not head.labels:
        return f"- **{head.task}**: no classes"
    names = ", ".join(f"`{label}`" for label in head.labels)
    origin = {
        "declared": "declared by the owner of the data",
        "file": "read from the data; the set of labels is assumed to be public",
    }[head.labels_from]
    return (
        f"- **{head.task}**: {names}, in the order of the logits ({origin}); {_reads(head)}, "
        f"up to {head.max_length} tokens"
    )


def _load_model(problem: Problem, family: str | None) -> str:
    name, reader = ("processor", "AutoImageProcessor") if problem.inputs == "image" else _TOKENIZER
    module = CLASSES.get(family or "")
    return (
        "```python\n"
        + (f"import {module}  # transformers has no such classifier\n" if module else "")
        + f"from transformers import {problem.loader}, {reader}\n\n"
        f"model = {problem.loader}.from_pretrained(FOLDER)\n"
        f"{name} = {reader}.from_pretrained(FOLDER)\n"
        "```\n\n"
        "or with confide, which also reads the claim:\n\n"
        "```\nconfide predict FOLDER --data new.csv\nconfide verify FOLDER\n```"
    )


def _load_merged(heads: tuple[Head, ...]) -> str:
    if not heads:
        return (
            "It is a plain model, of the class that `config.json` names:\n\n"
            "```python\n"
            "from transformers import AutoModel, AutoTokenizer\n\n"
            "model = AutoModel.from_pretrained(FOLDER)\n"
            "tokenizer = AutoTokenizer.from_pretrained(FOLDER)\n"
            "```"
        )
    head = heads[0]
    labels = json.dumps(list(head.labels or ("number",)), ensure_ascii=False)
    writes = head.problem.target == "text"
    options = "" if writes else ", num_labels=len(labels)"
    return (
        "The encoder is a plain one:\n\n"
        "```python\n"
        "from transformers import AutoModel, AutoTokenizer\n\n"
        "encoder = AutoModel.from_pretrained(FOLDER)\n"
        "tokenizer = AutoTokenizer.from_pretrained(FOLDER)\n"
        "```\n\n"
        "With a task's head, plain transformers (the names in `heads/` are the whole model's):\n\n"
        "```python\n"
        "from safetensors.torch import load_file\n"
        f"from transformers import {head.problem.loader}\n\n"
        + ("" if writes else f"labels = {labels}\n")
        + f"model = {head.problem.loader}.from_pretrained(FOLDER{options})\n"
        f'model.load_state_dict(load_file("FOLDER/heads/{head.task}/model.safetensors"), strict=False)\n'
        "```\n\n"
        "or confide, which can also write that model down as a folder that plain transformers loads:\n\n"
        f"```\nconfide export FOLDER --task {head.task} --out {head.task}\n"
        f"confide evaluate FOLDER --task {head.task}\nconfide verify FOLDER\n```"
    )


def _claim(statement: Statement, signed_by: str | None) -> str:
    answer = (
        f"Signed by the key `{signed_by}` (fingerprint {fingerprint(signed_by)}), whose owner asserts that "
        "noise was added as stated; arithmetic and integrity can be checked by anybody, the noise can't be "
        "seen."
        if signed_by
        else "Not signed: nobody asserts that noise was added."
    )
    check = "`confide verify FOLDER` checks all of this, and `confide privacy card FOLDER` explains it."
    if statement.claim is None:
        reason = statement.no_claim or "no reason is given"
        return (
            f"**Nothing is claimed for these weights**: {reason.rstrip('.')}. They may reveal the records "
            f"that they were trained on.\n\n{answer}\n\n{check}"
        )
    limits = "\n".join(f"- **{name}.** {said}" for name, said in not_protected(statement))
    return "\n\n".join(
        [
            _promise(statement.claim, statement),
            "Trained on:\n\n" + "\n".join(_spending(spending) for spending in statement.spendings),
            f"**Protected against**: {ADVERSARY} {NO_ADVERSARY}",
            f"**Not protected**:\n\n{limits}",
            "Under these assumptions:\n\n" + "\n".join(f"- {line}" for line in statement.assumptions)
            if statement.assumptions
            else "No further assumptions.",
            answer,
            check,
        ]
    )


def _promise(claim: Claim, statement: Statement) -> str:
    renyi = (
        f"; the Rényi bound at the same δ is {round_up(claim.epsilon_rdp, 4)}"
        if claim.epsilon_rdp is not None
        else ""
    )
    shared = ""
    if statement.kind == "merge" and len({spending.dataset for spending in statement.spendings}) > 1:
        shared = f" {apart(statement)}" + (
            "; if that is wrong, the claim is too small."
            if statement.disjoint
            else ", so what was spent adds up."
        )
    return (
        f"**ε = {round_up(claim.epsilon, 4)}, δ = {round_up(claim.delta, 3)}.** {promise(claim, statement)} "
        f"It is an upper bound ({claim.accountant}){renyi}.{shared}"
    )


def _spending(spending: Spending) -> str:
    unit = "records" if spending.unit == "record" else f"units (values of `{spending.unit}`)"
    if spending.event is None:
        return f"- `{spending.dataset}`, {spending.units} {unit}: {spending.no_claim or 'no claim'}"
    whole = spending.schedule.queries if spending.schedule else ()
    drawn = queries(spending.event) - sum(len(query.noise_multipliers) for query in whole)
    beside = "".join(f", and the {query.purpose} of all of them once, noised" for query in whole)
    return (
        f"- `{spending.dataset}`, {spending.units} {unit} ({spending.adjacency.replace('-', ' ')}): "
        f"{_count(drawn, 'noisy query', 'noisy queries')} on random minibatches{beside}"
    )


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
