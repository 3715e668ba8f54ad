"""A merge before it happens: which rule makes each tensor, what it needs, and what it will claim."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from confide.errors import MergeError
from confide.merging.assign import Group, groups_of, is_base, prepare, without_base
from confide.merging.inputs import Input, PublicBase, identity, read_inputs, statement_of, task_vectors
from confide.merging.lora import Adapter
from confide.merging.memory import CHUNKS, streaming
from confide.merging.operators import find
from confide.merging.operators.specification import Operator, Rule
from confide.merging.recipe import Model, Recipe
from confide.merging.statistics import StatisticsFile, match_statistics, split
from confide.merging.stream import reason
from confide.merging.vectors import Encoder, TaskVectors
from confide.privacy.composition import compose
from confide.privacy.statement import Base, OwnersChecked, Statement
from confide.release import agreement as agreements
from confide.release.format import STATISTICS, ReleaseInfo
from confide.release.hashes import tensors_hash
from confide.release.tensors import FLOATS, STORAGE

_BLOCK = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True)
class Plan:
    """A merge that can be done.

    Attributes:
        operator: the operator.
        groups: settings, and the tensors that they are for.
        public: the base, opened.
        base: as statements name it.
        inputs: the models, opened.
        vectors: their task vectors.
        statistics: of each model, where the operator needs them.
        dtype: of the output's floating-point tensors; None keeps the base's.
        heads: patterns of tensors that stay per task, as given.
        info: confide.json of the merge.
        statement: its claim; hashes of its weights are filled in when it is written.
    """

    operator: Operator
    groups: tuple[Group, ...]
    public: PublicBase
    base: Base
    inputs: tuple[Input, ...]
    vectors: TaskVectors
    statistics: tuple[StatisticsFile, ...]
    dtype: str | None
    heads: tuple[str, ...] | None
    info: ReleaseInfo
    statement: Statement

    @property
    def parameters(self) -> Mapping[str, Any]:
        """Settings of the operator; where tensors differ, a list of all values that one has."""
        if len(self.groups) == 1:
            return self.groups[0].settings
        listed = {
            key: list(dict.fromkeys(g.settings[key] for g in self.groups)) for key in self.groups[0].settings
        }
        return {key: values[0] if len(values) == 1 else values for key, values in listed.items()}

    def disagreements(self) -> tuple[str, ...]:
        """What the agreements that the models were trained under differ in; without agreements, whether the
        statements tell that experts of other layers were trained.
        """
        hashes = {item.tasks: item.statement.agreement if item.statement else None for item in self.inputs}
        if set(hashes.values()) == {None}:
            return self._experts()
        if len(set(hashes.values())) == 1:
            return ()
        found = [f"{name} was trained under no agreement" for name, value in hashes.items() if not value]
        known = {
            item.tasks: agreements.read(item.path / agreements.FILE_NAME)
            for item in self.inputs
            if hashes[item.tasks] and (item.path / agreements.FILE_NAME).exists()
        }
        unknown = [
            f"{name} was trained under {value}"
            for name, value in hashes.items()
            if value and name not in known
        ]
        return (*found, *unknown, *agreements.differences(known))

    def _experts(self) -> tuple[str, ...]:
        blocks = {item.tasks: _expert_blocks(item.statement) for item in self.inputs if item.statement}
        if len(set(blocks.values())) < 2:
            return ()
        said = (f"{', '.join(map(str, each)) or 'none'} ({name})" for name, each in blocks.items())
        return (f"blocks whose experts were trained: {', '.join(said)}",)

    def rule(self) -> Rule:
        """Look at the whole models, as often as the operator needs to."""
        return prepare(self.vectors, self.operator, self.groups, self.statistics)

    def output(self, name: str) -> tuple[str, tuple[int, ...]]:
        """dtype and shape of a tensor of the merge."""
        own = self.vectors.base.dtype(name)
        return (self.dtype if self.dtype and own in FLOATS else own), self.vectors.base.shape(name)

    def lines(self) -> list[dict[str, Any]]:
        """For each tensor of the merge its dtype, shape, bytes, and the rule that will make it.

        Reads the models as far as it must, to know which tensors no model changed.
        """
        settings = {name: group.settings for group in self.groups for name in group.names}
        lines = []
        for name in sorted(self.vectors.base.names):
            dtype, shape = self.output(name)
            lines.append(
                {
                    "name": name,
                    "dtype": dtype,
                    "shape": list(shape),
                    "bytes": self.vectors.size(name) * STORAGE[dtype].itemsize,
                    "rule": reason(self.vectors, name)
                    or self.operator.reason(self.vectors, self.statistics, name)
                    or self.operator.name,
                    "settings": dict(settings.get(name, {})) if len(self.groups) > 1 else None,
                }
            )
        return lines

    def memory(self) -> tuple[int, str]:
        """Private memory in bytes that the merge will need, beside Python and its libraries, and what for.

        Chunks of every model, and the sample or the tables of order statistics; for an operator of whole
        matrices, the largest matrix with its Gram, each a few times.
        """
        ranks = self.operator.takes == "model"
        needed = streaming(self.vectors.count, self.vectors.chunk, ranks=ranks)
        needed += sum(item.weights.held for item in self.inputs if isinstance(item.weights, Adapter))
        if self.operator.takes != "matrices":
            return needed, "chunks of every model"
        turned = self.vectors.turned
        matrices = [
            (8 * (7 * shape[-2] * shape[-1] + 7 * shape[-2 if name in turned else -1] ** 2), name)
            for name in self.vectors.changed
            if self.operator.tensors.match(name, shape := self.vectors.base.shape(name))
        ]
        largest, name = max(matrices, default=(0, ""))
        return needed + largest, f"matrix {name} and its Gram" if name else "chunks of every model"

    def with_statistics(self, files: Sequence[Path]) -> Plan:
        """The same merge, by statistics that were computed since.

        Raises:
            MergeError: they are of other models.
        """
        return replace(self, statistics=tuple(_match(self.inputs, files)))

    def within(self, memory: int) -> Plan:
        """The same merge, in chunks so small that it needs no more private memory than `memory` bytes.

        Shards make no difference: their tensors are written as they are computed.

        Raises:
            MergeError: it needs more whatever the chunks; says how much, and what for.
        """
        for chunk in CHUNKS:
            plan = replace(self, vectors=self.vectors.in_chunks(chunk))
            needed, what = plan.memory()
            if needed <= memory:
                return plan
        raise MergeError(
            f"{self.operator.name} needs {needed / 1e6:.0f} MB of private memory for {what}, but only "
            f"{memory / 1e6:.0f} MB are allowed"
        )


def plan_models(
    models: Sequence[Path],
    *,
    base: Path,
    operator: str,
    parameters: Mapping[str, Any] | None = None,
    statistics: Sequence[Path] = (),
    heads: Sequence[str] | None = None,
    dtype: str | None = None,
    disjoint: bool | OwnersChecked = False,
) -> Plan:
    """The merge of some folders by one operator with the same settings everywhere (`merge.merge`)."""
    chosen = find(operator)
    settings = chosen.settings(parameters or {})
    public, inputs = read_inputs(models, base, heads)
    vectors = task_vectors(inputs, public)
    groups = (Group(settings, vectors.names),)
    return plan_inputs(chosen, groups, public, inputs, vectors, statistics, dtype, heads, disjoint)


def plan_recipe(
    recipe: Recipe,
    base: Path,
    statistics: Sequence[Path] = (),
    disjoint: bool | OwnersChecked = False,
) -> Plan:
    """The merge that a recipe describes.

    Args:
        recipe: from `recipe.read`.
        base: folder of its base, resolved.
        statistics: files besides those that the recipe names.
        disjoint: what the caller declares beside the recipe (`merge.merge`).

    Raises:
        MergeError: as `merge.merge`; what is wrong in the recipe is named with its line and key.
    """
    own = without_base(recipe)
    if not own.models:
        raise recipe.wrong("models", "holds nothing but the base")
    for number, model in enumerate(recipe.models):
        if not is_base(recipe, model) and not model.path.is_dir():
            raise recipe.wrong(f"models[{number}].model", f"{model.path} doesn't exist, or is no folder")
    find_operator(recipe)
    public, inputs = read_inputs(
        [model.path for model in own.models], base, recipe.heads, [model.task for model in own.models]
    )
    vectors = task_vectors(inputs, public)
    prefix = next((item.prefix for item in inputs), "")
    operator, groups = groups_of(recipe, vectors.names, prefix)
    files = [*statistics, *_statistics_of(recipe, own.models)]
    return plan_inputs(
        operator,
        groups,
        public,
        inputs,
        vectors,
        files,
        recipe.dtype,
        recipe.heads,
        disjoint or recipe.disjoint,
    )


def find_operator(recipe: Recipe) -> Operator:
    """The recipe's operator, before anything is read."""
    try:
        return find(recipe.operator)
    except MergeError as error:
        raise recipe.wrong("merge_method", str(error)) from None


def plan_inputs(
    operator: Operator,
    groups: tuple[Group, ...],
    public: PublicBase,
    inputs: tuple[Input, ...],
    vectors: TaskVectors,
    statistics: Sequence[Path],
    dtype: str | None,
    heads: Sequence[str] | None,
    disjoint: bool | OwnersChecked,
) -> Plan:
    """A plan from inputs that are open already; arguments are the plan's own attributes."""
    base = identity(inputs, public)
    info = ReleaseInfo(
        kind="merged",
        encoder_prefix=next((item.prefix for item in inputs if item.heads), ""),
        heads=tuple(head for item in inputs for head, _ in item.heads),
    )
    composed = compose(
        [statement_of(item, base) for item in inputs],
        disjoint=disjoint,
        base=base,
        said=[item.said for item in inputs if item.said is not None],
    )
    return Plan(
        operator=operator,
        groups=groups,
        public=public,
        base=base,
        inputs=inputs,
        vectors=vectors,
        statistics=tuple(_match(inputs, statistics)),
        dtype=dtype,
        heads=None if heads is None else tuple(heads),
        info=info,
        statement=composed,
    )


def _statistics_of(recipe: Recipe, models: Sequence[Model]) -> list[Path]:
    """The files that a recipe's `statistics` names; of a text they are computed by who can run the models."""
    needs = find_operator(recipe).needs
    if recipe.statistics is None:
        return []
    if recipe.statistics == "data-free":
        if needs:
            raise recipe.wrong(
                "statistics", f"{recipe.operator} needs {needs} of each model's data; actmat is data-free"
            )
        return []
    if not needs:
        raise recipe.wrong("statistics", f"{recipe.operator} needs none; leave the key out")
    if recipe.statistics == "released":
        return [model.path / STATISTICS for model in models]
    return list(split(recipe.statistics)[0])


def _match(inputs: Sequence[Input], paths: Sequence[Path]) -> list[StatisticsFile]:
    """Those of each input, told by the weights that they were computed on."""
    if not paths:
        return []
    covered = {hash for item in inputs if item.statement for hash in item.statement.weights.values()}
    models = {}
    for item in inputs:
        if not isinstance(item.weights, Encoder):
            raise MergeError(f"{item.path} is an adapter; statistics are of a whole model's folder")
        models[tensors_hash(item.weights.checkpoint, item.weights.stored)] = item.tasks
    return match_statistics([StatisticsFile(Path(path), covered) for path in paths], models)


def _expert_blocks(statement: Statement) -> tuple[int, ...]:
    """Numbers of the blocks whose experts a model's streams of owners trained, as its statement says."""
    names = [
        name
        for spending in statement.spendings
        if spending.schedule
        for stream in spending.schedule.streams
        if stream.ownership == "owner"
        for name in stream.parameters
    ]
    return tuple(sorted({int(number) for name in names for number in _BLOCK.findall(name)[:1]}))
