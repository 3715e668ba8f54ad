from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from confide.errors import MergeError, ModelError, ReleaseError
from confide.merging.inputs import PublicBase, read_inputs
from confide.merging.merge import merge, write
from confide.merging.plan import Plan, plan_models
from confide.merging.vectors import Encoder
from confide.models.releases import load_release
from confide.release import format, shards
from confide.release.export import export
from confide.release.tensors import Checkpoint
from confide.release.write import verify

from .conftest import make_base, make_release

Make = Callable[..., Path]
SHARDS = "model-*-of-*.safetensors"


def plain(folder: Path, release: Path) -> Path:
    """What transformers saved, without anything of confide's."""
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(release / name, folder / name)
    return folder


def sharded(folder: Path, limit: int) -> Path:
    """The same model in shards, as transformers writes them."""
    whole = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    assert len(shards.write_shards(folder, whole, limit)) > 1
    return folder


@pytest.fixture(scope="session")
def llamas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder, two causal models and two classifiers fine-tuned from it; embeddings tied on request."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, LlamaModel

    torch.set_num_threads(1)
    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("llamas")
    sizes = {
        "vocab_size": 20,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 16,
        "pad_token_id": 0,
    }
    for kind in ("causal", "tied"):
        config = LlamaConfig(**sizes, tie_word_embeddings=kind == "tied")
        base = LlamaForCausalLM(config)
        base.save_pretrained(root / kind)
        for name in ("one", "two"):
            for parameter in base.parameters():
                parameter.data += torch.randn_like(parameter) / 100
            base.save_pretrained(root / f"{kind}-{name}")
    body = LlamaForCausalLM.from_pretrained(root / "causal").model
    for name, labels in (("films", 2), ("tweets", 3)):
        model = LlamaForSequenceClassification(LlamaConfig(**sizes, num_labels=labels))
        model.model.load_state_dict(body.state_dict())
        for parameter in model.parameters():
            parameter.data += torch.randn_like(parameter) / 100
        model.save_pretrained(root / name)
    plain_body = LlamaModel(LlamaConfig(**sizes))
    plain_body.load_state_dict(body.state_dict())
    plain_body.save_pretrained(root / "plain")
    return root


def test_a_plain_folder_merges_as_its_release_does(
    base: Path, releases: tuple[Path, Path], tmp_path: Path
) -> None:
    folders = [plain(tmp_path / path.name, path) for path in releases]
    ours = merge(folders, base=base, operator="ties", out=tmp_path / "ours")
    theirs = merge(releases, base=base, operator="ties", out=tmp_path / "theirs")
    for name in ("model.safetensors", "heads/films/model.safetensors", "heads/tweets/model.safetensors"):
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()
    assert ours.statement.claim is None
    assert theirs.statement.claim is not None
    assert [head.labels for head in ours.info.heads] == [head.labels for head in theirs.info.heads]
    assert ours.info.encoder_prefix == "bert."
    mixed = merge([folders[0], releases[1]], base=base, operator="ties", out=tmp_path / "mixed")
    assert mixed.statement.claim is None
    assert "films" in (mixed.statement.no_claim or "")


def test_shards_in_and_out(base: Path, releases: tuple[Path, Path], tmp_path: Path) -> None:
    import torch
    from transformers import AutoModel

    folders = [sharded(plain(tmp_path / path.name, path), 2000) for path in releases]
    merge(folders, base=base, operator="average", out=tmp_path / "merged", shard_size=3000)
    shards = sorted((tmp_path / "merged").glob(SHARDS))
    assert len(shards) > 2
    assert not (tmp_path / "merged" / "model.safetensors").exists()
    index = json.loads((tmp_path / "merged" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for s in shards for t in load_file(s).values())
    for shard in shards:
        size = sum(values.nbytes for values in load_file(shard).values())
        assert size <= 3000 or len(load_file(shard)) == 1
    merge(releases, base=base, operator="average", out=tmp_path / "whole")
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    model, found = AutoModel.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not found["missing_keys"]
    for name, values in model.state_dict().items():
        torch.testing.assert_close(values, torch.from_numpy(whole[name]), rtol=0, atol=0)
    verify(tmp_path / "merged")


def test_decoders_merge_whole(llamas: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    models = [llamas / "causal-one", llamas / "causal-two"]
    report = merge(models, base=llamas / "causal", operator="average", out=tmp_path / "merged")
    ours = load_file(tmp_path / "merged" / "model.safetensors")
    assert "lm_head.weight" in ours
    for name, values in ours.items():
        mean = np.mean([load_file(m / "model.safetensors")[name].astype(float) for m in models], axis=0)
        np.testing.assert_allclose(values, mean, rtol=3e-7, atol=1e-9)
    assert report.info.heads == ()
    assert report.models == ("causal-one", "causal-two")
    _, found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not found["missing_keys"]
    assert "# Merged model" in (tmp_path / "merged" / "README.md").read_text()


@pytest.mark.parametrize("start", ["causal", "plain"])
def test_classifiers_on_a_decoder_keep_their_heads(llamas: Path, tmp_path: Path, start: str) -> None:
    models = [llamas / "films", llamas / "tweets"]
    report = merge(models, base=llamas / start, operator="average", out=tmp_path / "merged")
    prefix = "model." if start == "causal" else ""
    ours = load_file(tmp_path / "merged" / "model.safetensors")
    assert {name.startswith(prefix) for name in ours} == {True}
    assert "lm_head.weight" not in ours
    assert [(head.task, len(head.labels)) for head in report.info.heads] == [("films", 2), ("tweets", 3)]
    assert report.info.encoder_prefix == ("" if prefix else "model.")
    score = load_file(tmp_path / "merged" / "heads" / "tweets" / "model.safetensors")["score.weight"]
    np.testing.assert_array_equal(score, load_file(models[1] / "model.safetensors")["score.weight"])


def test_a_head_where_asked(llamas: Path, tmp_path: Path) -> None:
    models = [llamas / "causal-one", llamas / "causal-two"]
    plan = plan_models(models, base=llamas / "causal", operator="average", heads=["lm_*"])
    report = write(plan, tmp_path / "merged")
    assert "lm_head.weight" not in load_file(tmp_path / "merged" / "model.safetensors")
    assert [head.tensors for head in report.info.heads] == [("lm_head.weight",)] * 2
    read_back = format.read(tmp_path / "merged")
    assert read_back.heads[0].labels == ()
    with pytest.raises(ReleaseError, match=r"causal-two is no classifier; `confide export` writes its model"):
        load_release(tmp_path / "merged", "causal-two")


@pytest.mark.parametrize("base", ["causal", "tied"])
def test_plain_transformers_loads_a_model_with_its_own_output_layer(
    llamas: Path, base: str, tmp_path: Path
) -> None:
    """Also where the base's output layer is its embedding: a task's own one isn't tied again."""
    from transformers import AutoModelForCausalLM

    models = [llamas / "causal-one", llamas / "causal-two"]
    plan = plan_models(models, base=llamas / base, operator="average", heads=["lm_head"])
    write(plan, tmp_path / "merged")
    export(tmp_path / "merged", "causal-two", tmp_path / "two")
    model, found = AutoModelForCausalLM.from_pretrained(tmp_path / "two", output_loading_info=True)
    assert not any(found.values())
    own = load_file(models[1] / "model.safetensors")["lm_head.weight"]
    np.testing.assert_array_equal(model.lm_head.weight.detach().numpy(), own)
    body = load_file(tmp_path / "merged" / "model.safetensors")
    for name, values in model.model.state_dict().items():
        np.testing.assert_array_equal(values.numpy(), body[f"model.{name}"])


def test_tied_weights_are_written_once(llamas: Path, tmp_path: Path) -> None:
    stored = llamas / "tied-one"
    twice = tmp_path / "twice"
    shutil.copytree(stored, twice)
    values = load_file(stored / "model.safetensors")
    assert "lm_head.weight" not in values
    both = values | {"lm_head.weight": values["model.embed_tokens.weight"]}
    save_file(both, twice / "model.safetensors", metadata={"format": "pt"})
    merge([twice, llamas / "tied-two"], base=llamas / "tied", operator="average", out=tmp_path / "merged")
    assert "lm_head.weight" not in load_file(tmp_path / "merged" / "model.safetensors")
    both["lm_head.weight"] = both["lm_head.weight"] + 1
    save_file(both, twice / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(MergeError, match=r"ties lm_head\.weight to the embeddings .* its values are others"):
        merge([twice], base=llamas / "tied", operator="average", out=tmp_path / "again")


def test_label_spaces_that_dont_fit(base: Path, release: Make, llamas: Path, tmp_path: Path) -> None:
    model = plain(tmp_path / "films", release("films"))
    config = json.loads((model / "config.json").read_text())
    config["id2label"] = {str(number): str(number) for number in range(5)}
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(MergeError, match=r"'films' in .* gives 2 logits .* label space has 5"):
        merge([model], base=base, operator="average", out=tmp_path / "merged")
    # Without heads, the classifiers themselves would be merged.
    with pytest.raises(MergeError, match="the label spaces have 3 and 2 labels"):
        plan_models([llamas / "tweets"], base=llamas / "films", operator="average", heads=["nothing"])


def test_other_families_and_missing_folders(base: Path, llamas: Path, tmp_path: Path) -> None:
    with pytest.raises(MergeError, match=r"different families: .* is a 'llama', base .* a 'bert'"):
        merge([llamas / "films"], base=base, operator="average", out=tmp_path / "merged")
    with pytest.raises(MergeError, match="nowhere doesn't exist, or is no folder"):
        merge([tmp_path / "nowhere"], base=base, operator="average", out=tmp_path / "merged")


def test_plain_files_that_are_broken(base: Path, release: Make, tmp_path: Path) -> None:
    model = plain(tmp_path / "films", release("films"))
    weights = model / "model.safetensors"
    content = weights.read_bytes()

    def attempt(error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            merge([model], base=base, operator="average", out=tmp_path / "merged")
        assert [path.name for path in tmp_path.iterdir() if "merged" in path.name] == []

    weights.write_bytes(content[:-10])
    attempt(ModelError, "is truncated: its tensors need")
    weights.write_bytes(content[:100])
    attempt(ModelError, "truncated within its header")
    weights.unlink()
    (model / "pytorch_model.bin").write_bytes(b"\x80\x02")
    attempt(ModelError, r"is a pickle checkpoint.*python -c .*torch\.load.*weights_only=True")
    (model / "pytorch_model.bin").unlink()
    (model / "config.json").write_text("{")
    weights.write_bytes(content)
    attempt(ModelError, "can't be read, or names no model_type")
    (model / "config.json").unlink()
    attempt(ModelError, r"has no config\.json")


def test_a_full_disk_leaves_nothing(
    base: Path, releases: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left = shards.write_tensors, [1]

    def full(path: Path, *rest: object) -> None:
        if left.pop() == 0:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        left.append(0)
        real(path, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(shards, "write_tensors", full)
    with pytest.raises(ReleaseError, match=r"can't write .*merged: No space left on device \(.*00002-of"):
        merge(releases, base=base, operator="ties", out=tmp_path / "merged", shard_size=3000)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_too_small_is_noticed_before(
    base: Path, releases: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = shutil.disk_usage(tmp_path)
    written = merge(releases, base=base, operator="average", out=tmp_path / "whole")
    assert written.merged
    size = sum(path.stat().st_size for path in (tmp_path / "whole").rglob("*.safetensors"))
    monkeypatch.setattr(Plan, "rule", lambda plan: pytest.fail("the models were read"))
    monkeypatch.setattr(shutil, "disk_usage", lambda place: real._replace(free=size // 2))
    with pytest.raises(ReleaseError, match=r"the merge takes .* GB, but only .* GB are free in "):
        merge(releases, base=base, operator="average", out=tmp_path / "deep" / "merged")
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]


def test_memory_that_isnt_enough(base: Path, releases: tuple[Path, Path], tmp_path: Path) -> None:
    plan = plan_models(releases, base=base, operator="actmat")
    needed, what = plan.memory()
    assert "matrix " in what
    write(plan, tmp_path / "enough", memory=needed)
    with pytest.raises(MergeError, match=r"actmat needs .* MB of private memory for matrix .* are allowed"):
        write(plan, tmp_path / "merged", memory=needed // 2)
    assert not (tmp_path / "merged").exists()


def test_a_head_only_merge_counts_nothing_as_merged(base: Path, tmp_path: Path) -> None:
    start = load_file(base / "model.safetensors")
    model = make_release(
        tmp_path / "films",
        base,
        "films",
        change=lambda t: {n: start.get(n.removeprefix("bert."), v) for n, v in t.items()},
    )
    report = merge([model], base=base, operator="ties", out=tmp_path / "merged")
    assert report.merged == 0
    assert len(report.tensors) == len(start)


def test_two_tokenizers(base: Path, release: Make, tmp_path: Path) -> None:
    other = make_base(tmp_path / "other", words=["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c"])
    model = plain(tmp_path / "films", release("films"))
    shutil.copyfile(other / "tokenizer.json", model / "tokenizer.json")
    with pytest.raises(
        MergeError, match=r"tokenizer of .*films \(8 tokens\) isn't that of base .* 'a' differs"
    ):
        read_inputs([model], base)


@pytest.mark.parametrize(
    ("family", "turned"), [("gpt_oss", True), ("llama4_text", True), ("moe_bert", False)]
)
def test_stacks_of_experts_that_are_kept_as_in_by_out(family: str, turned: bool) -> None:
    stacks = {f"layers.0.mlp.experts.{part}_proj" for part in ("gate_up", "down")}
    others = {"layers.0.mlp.experts.down_proj_bias", "layers.0.self_attn.o_proj.weight"}
    weights = Encoder("base", Checkpoint(Path("base"), ()), {name: name for name in stacks | others})
    assert PublicBase(Path("base"), family, "", weights, "").turned == (stacks if turned else set())
