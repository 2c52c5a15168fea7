"""Models of `transformers`, imported and exported: the same logits, and training goes on."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from torch import Tensor

from axrt.checkpoint.folder import newest_undamaged
from axrt.cli import main
from axrt.config import Config
from axrt.data.tokenizer import train_tokenizer
from axrt.errors import DataError
from axrt.generation.loading import layers_of_rank
from axrt.hugging_face.text_files import TextEnds

from ..cli.test_train import TINY
from ..mpi.mpirun import mpirun

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # theirs

VOCAB, CONTEXT = 260, 32
OF_LLAMA = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4} | {
    "intermediate_size": 48,
    "vocab_size": VOCAB,
    "max_position_embeddings": CONTEXT,
}
SCALED = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0} | {
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
THEIRS: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_layer": 3, "n_head": 4}
    | {"vocab_size": VOCAB, "n_positions": CONTEXT},
    "gpt2, own head": {"model_type": "gpt2", "n_embd": 24, "n_layer": 1, "n_head": 2}
    | {"vocab_size": VOCAB, "n_positions": CONTEXT, "tie_word_embeddings": False, "n_inner": 40}
    | {"activation_function": "gelu"},
    "llama": {"model_type": "llama", **OF_LLAMA},
    "llama 3": {"model_type": "llama", **OF_LLAMA, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
    | {"rope_parameters": SCALED},
    "llama, linear": {"model_type": "llama", **OF_LLAMA, "rope_parameters": LINEAR},
    "qwen2": {"model_type": "qwen2", **OF_LLAMA, "num_key_value_heads": 1}
    | {"tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", **OF_LLAMA, "num_key_value_heads": 2, "head_dim": 10},
}


def axrt(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


@pytest.fixture(autouse=True)
def in_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("all work and no play " * 40)


def saved(config: dict[str, Any], **options: Any) -> Any:
    """A model of theirs in the directory `theirs`, all of whose weights differ."""
    torch.manual_seed(0)
    kind = {key: value for key, value in config.items() if key != "model_type"}
    made = transformers.AutoConfig.for_model(config["model_type"], **kind)
    model = transformers.AutoModelForCausalLM.from_config(made).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained("theirs", **options)
    return model


def logits_of(run: str, tokens: Tensor) -> Tensor:
    _, model = newest_undamaged(Path(run), partial(layers_of_rank, rank=0, ranks=1), print)
    found: Tensor = model(tokens)
    return found


def check_same(ours: Tensor, theirs: Tensor) -> None:
    assert torch.allclose(ours, theirs, atol=1e-5, rtol=1e-5), (ours - theirs).abs().max()


TOKENS = torch.randint(VOCAB, (2, CONTEXT), generator=torch.Generator().manual_seed(1))
KEYS = ("model_type", "vocab_size", "rms_norm_eps", "layer_norm_epsilon", "rope_parameters")


@pytest.mark.parametrize("name", THEIRS)
def test_an_imported_model_has_their_logits_trains_on_and_is_exported_again(name: str) -> None:
    theirs = saved(THEIRS[name])
    result = axrt("import", "--hf", "theirs", "--out", "run")
    assert result.exit_code == 0, result.output
    check_same(logits_of("run", TOKENS), theirs(TOKENS).logits)
    trained = axrt(
        *("train", "run/config.toml", "checkpoint.resume=run", "run.out=tuned", "run.steps=6"),
        *("data.source=text.txt", "data.tokenizer=bytes", "schedule.microbatches=2"),
        *("optimizer.lr=1e-3", "optimizer.warmup_steps=0"),
        *("run.log_every=1", "run.device=cpu", "run.eval_every=0", "data.held_out=0"),
    )
    assert trained.exit_code == 0, trained.output
    metrics = Path("tuned/metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line).get("loss") for line in metrics]
    assert losses[-1] < losses[1], "it learns"
    assert axrt("export", "tuned", "--hf", "back").exit_code == 0
    again = transformers.AutoModelForCausalLM.from_pretrained("back").eval()
    check_same(logits_of("tuned", TOKENS), again(TOKENS).logits)
    for key in KEYS:
        assert getattr(again.config, key, None) == getattr(theirs.config, key, None), key


@pytest.mark.long
def test_an_imported_model_trains_on_two_stages_of_two_members() -> None:
    saved(THEIRS["llama 3"])
    assert axrt("import", "--hf", "theirs", "--out", "run").exit_code == 0
    keys = (
        *("checkpoint.resume=run", "run.out=tuned", "run.steps=4", "run.device=cpu"),
        *("data.source=text.txt", "data.tokenizer=bytes", "data.held_out=0", "run.eval_every=0"),
        *("schedule.microbatches=4", "optimizer.warmup_steps=0", "parallel.tensor=2"),
    )
    ended = mpirun(4, ["-m", "axrt", "train", "run/config.toml", *keys], cwd=Path.cwd())
    assert ended.code == 0, ended.err
    assert axrt("export", "tuned", "--hf", "back").exit_code == 0
    again = transformers.AutoModelForCausalLM.from_pretrained("back").eval()
    check_same(logits_of("tuned", TOKENS), again(TOKENS).logits)


def test_files_in_parts_and_in_other_types_are_read_and_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from axrt.hugging_face import files

    theirs = saved(THEIRS["llama 3"], max_shard_size="20KB").to(torch.bfloat16)
    theirs.save_pretrained("theirs", max_shard_size="20KB")
    assert len(list(Path("theirs").glob("*.safetensors"))) > 2
    assert axrt("import", "--hf", "theirs", "--out", "run").exit_code == 0
    groups = files._groups
    monkeypatch.setattr(files, "_groups", lambda sizes: groups(sizes, 20_000))
    assert axrt("export", "run", "--hf", "back", "--dtype", "bfloat16").exit_code == 0
    assert len(list(Path("back").glob("*.safetensors"))) > 2
    again = transformers.AutoModelForCausalLM.from_pretrained("back")
    expected = theirs.state_dict()
    assert again.dtype == torch.bfloat16
    assert all(torch.equal(value, expected[key]) for key, value in again.state_dict().items())


def test_text_comes_out_as_theirs_with_the_tokenizer_that_is_kept() -> None:
    theirs = saved(THEIRS["qwen3"])
    from axrt.data.tokenizer import train_tokenizer

    train_tokenizer(iter(["all work and no play"] * 9), VOCAB, Path("theirs/tokenizer.json"))
    axrt("import", "--hf", "theirs", "--out", "run")
    assert axrt("export", "run", "--hf", "back").exit_code == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained("back")
    given = tokenizer("all work", return_tensors="pt")
    written = theirs.generate(
        **given, max_new_tokens=20, do_sample=False, eos_token_id=tokenizer.eos_token_id
    )
    expected = tokenizer.decode(written[0], skip_special_tokens=True)
    told = axrt(
        *("generate", "run", "--prompt", "all work", "--tokens", "20", "--temperature", "0"),
    )
    assert told.exit_code == 0, told.output
    text = told.output.removesuffix("\n").replace("<|endoftext|>", "")
    assert len(text) > len("all work")
    assert expected.startswith(text), "but for a character that is not whole at the end"


def going_on(run: str, out: str, *keys: str) -> list[str]:
    """The words of a training of one step that begins from an imported model."""
    brief = ("run.steps=1", "run.device=cpu", "schedule.microbatches=1", "data.held_out=0")
    into = ("train", f"{run}/config.toml", f"checkpoint.resume={run}", f"run.out={out}")
    return [*into, *brief, "optimizer.warmup_steps=0", *keys]


SUFFIXES = {".json", ".jinja", ".txt", ".md"}
OTHER_FILES = {
    "chat_template.jinja": "{% for message in messages %}\n  {{ message }}{% endfor %}",
    "special_tokens_map.json": '{"eos_token":   {"content": "<|endoftext|>"}}',
    "added_tokens.json": '{"<|x|>": 259}',
    "merges.txt": "#version: 0.2\na b\n",
    "README.md": "# Theirs \u00e4\n",
}


@pytest.mark.parametrize("of_generation", [True, False])
def test_every_file_beside_the_weights_comes_along_to_the_byte(of_generation: bool) -> None:
    saved(THEIRS["llama 3"])
    train_tokenizer(["all work and no play " * 9], 258, Path("theirs/tokenizer.json"))
    Path("theirs/tokenizer_config.json").write_text('{"eos_token":"<|endoftext|>",\n\n"x":1}')
    for name, content in OTHER_FILES.items():
        Path("theirs", name).write_text(content)
    said = '{"temperature": 0.6,\t"top_k": 20, "eos_token_id": [0, 5], "bos_token_id": 1}'
    Path("theirs/generation_config.json").write_text(said)
    if not of_generation:
        Path("theirs/generation_config.json").unlink()
    Path("theirs/original").mkdir()
    Path("theirs/original/params.json").write_text("{ }")
    for left in (".env", "model.onnx_data", "data.parquet"):
        Path("theirs", left).write_text("left where it is")
    assert axrt("import", "--hf", "theirs", "--out", "run").exit_code == 0
    told = axrt("prepare", "text.txt", "--tokenizer", "run/tokenizer.json", "--out", "mine")
    assert told.exit_code == 0, told.output
    trained = axrt(*going_on("run", "tuned", "data.source=mine.bin"))
    assert trained.exit_code == 0, trained.output
    for run in ("run", "tuned"):
        done = axrt("export", run, "--hf", f"{run}-back")
        assert done.exit_code == 0, done.output
        own = ("config.json", "model.safetensors")
        kept = [path for path in Path("theirs").rglob("*") if path.suffix in SUFFIXES]
        files = {str(path.relative_to("theirs")) for path in kept} - {*own}
        assert files >= {*OTHER_FILES, "original/params.json"}
        for name in files:
            assert Path(f"{run}-back", name).read_bytes() == Path("theirs", name).read_bytes()
        back = [path for path in Path(f"{run}-back").rglob("*") if path.is_file()]
        more = {str(path.relative_to(f"{run}-back")) for path in back} - files - {*own}
        assert more == (set() if of_generation else {"generation_config.json"})


def test_text_is_not_read_as_bytes_where_tokens_stand_for_something_else() -> None:
    """A run of an imported model once went on with bytes for the numbers of its tokens."""
    saved(THEIRS["llama 3"])
    for kept in (False, True):
        if kept:
            train_tokenizer(["all work and no play " * 9], 258, Path("theirs/tokenizer.json"))
        assert axrt("import", "--hf", "theirs", "--out", f"run-{kept}").exit_code == 0
        for keys in ([], ["data.source=['text.txt', 'a b.txt']"], ["data.source=text.txt"]):
            refused = axrt(*going_on(f"run-{kept}", "tuned", *keys))
            assert refused.exit_code == 2, refused.output
            assert "text, which would be read as bytes" in refused.output
            assert not Path("tuned").exists()
        how = f"{Path('run-True').absolute()}/tokenizer.json" if kept else "ITS_TOKENIZER.json"
        assert f"--tokenizer {how} --out mine" in refused.output
        meant = axrt(
            *going_on(f"run-{kept}", f"of-bytes-{kept}", "data.source=text.txt"),
            "data.tokenizer=bytes",
        )
        assert meant.exit_code == 0, meant.output


def test_a_model_of_few_tokens_is_imported_and_goes_on_as_such_are() -> None:
    saved({**THEIRS["gpt2"], "vocab_size": 40})
    told = axrt("import", "--hf", "theirs", "--out", "run")
    assert told.exit_code == 0, told.output
    assert "settings for going on: optimizer.lr = 2e-05, optimizer.warmup_steps = 50" in told.output
    assert Config.read("run/config.toml").optimizer.clip == 1.0
    (np.arange(200, dtype=np.uint16) % 40).tofile("tokens.bin")
    trained = axrt(*going_on("run", "tuned", "data.source=tokens.bin"))
    assert trained.exit_code == 0, trained.output


def greedy(directory: str, prompt: list[int], tokens: int) -> list[int]:
    """What transformers writes behind a prompt, with the files of that directory alone."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
    given = torch.tensor([prompt])
    written = model.generate(given, max_new_tokens=tokens, do_sample=False)
    return [int(token) for token in written[0, len(prompt) :]]


def test_tokens_that_begin_and_end_a_text_come_along() -> None:
    saved(THEIRS["llama 3"])
    free = greedy("theirs", [1, 2, 3], 12)
    assert len(free) == 12
    ends = [free[4], VOCAB - 1]
    said = json.loads(Path("theirs/generation_config.json").read_text())
    said |= {"bos_token_id": 11, "eos_token_id": ends}
    Path("theirs/generation_config.json").write_text(json.dumps(said))
    assert axrt("import", "--hf", "theirs", "--out", "run").exit_code == 0
    assert axrt("export", "run", "--hf", "back").exit_code == 0
    for name in ("config.json", "generation_config.json"):
        back = json.loads(Path("back", name).read_text())
        assert (back["bos_token_id"], back["eos_token_id"]) == (11, ends), name
    written = greedy("back", [1, 2, 3], 12)
    assert written[-1] in ends
    assert len(written) < 12
    np.arange(200, dtype=np.uint16).tofile("tokens.bin")
    for name, source in (("tuned", "tokens.bin"), ("of-bytes", "text.txt")):
        words = going_on("run", name, f"data.source={source}", "optimizer.lr=0")
        trained = axrt(*words, *(["data.tokenizer=bytes"] if name == "of-bytes" else []))
        assert trained.exit_code == 0, trained.output
    asked = ("--temperature", "0", "--tokens", "12", "--speed")
    for run, prompt in (("run", "\x01\x02\x03"), ("tuned", "1 2 3")):
        told = axrt("generate", run, "--prompt", prompt, *asked)
        assert f"\n{len(written) - 1} tokens, " in told.output, told.output
    assert not Path("of-bytes/generation_config.json").exists(), "its text is of other tokens"


@pytest.mark.parametrize(
    ("said", "found"),
    [
        (({"eos_token_id": 5}, {"eos_token_id": 7, "bos_token_id": 1}), TextEnds(1, (5,))),
        (({"eos_token_id": [5, 6], "bos_token_id": None},), TextEnds(None, (5, 6))),
        (({"eos_token_id": -1, "bos_token_id": -1},), TextEnds()),
        (({},), TextEnds()),
    ],
)
def test_files_say_what_ends_a_text(said: tuple[dict[str, Any], ...], found: TextEnds) -> None:
    assert TextEnds.of(*said) == found
    assert TextEnds.of(found.as_dict()) == found


@pytest.mark.parametrize("token", [True, "</s>", [1, None], 1.5])
def test_what_is_no_token_is_refused_by_its_key(token: Any) -> None:
    with pytest.raises(DataError, match="eos_token_id = .*; expected a token"):
        TextEnds.of({"eos_token_id": token})


def test_a_text_ends_in_transformers_where_it_does_here() -> None:
    """With a tokenizer of its own, and documents that are kept apart."""
    rows = "\n".join(json.dumps({"text": f"{number} is {number}."}) for number in range(40))
    Path("rows.jsonl").write_text(rows)
    made = axrt(*("prepare", "rows.jsonl", "--out", "rows", "--train-tokenizer", "280"))
    assert made.exit_code == 0, made.output
    Path("tiny.toml").write_text(TINY.replace('source = "text.txt"', 'source = "rows.bin"'))
    llama = ('model.norm="rms"', 'model.feed="swiglu"', 'model.bias="none"', "model.vocab=280")
    trained = axrt(
        *("train", "tiny.toml", *llama, 'model.positions="rotary"', "data.document_end=0"),
        *("model.width=32", "model.heads=2", "model.context=16", "run.steps=60", "data.held_out=0"),
        *("run.eval_every=0", "optimizer.lr=1e-2", "schedule.microbatches=8"),
    )
    assert trained.exit_code == 0, trained.output
    assert axrt("export", "out", "--hf", "back").exit_code == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained("back")
    assert tokenizer.eos_token == "<|endoftext|>"
    written = greedy("back", tokenizer("12 is")["input_ids"], 40)
    assert written[-1] == 0, "it has learned that texts end"
    told = axrt("generate", "out", "--prompt", "12 is", "--tokens", "40", "--temperature", "0")
    assert told.output == "12 is" + tokenizer.decode(written[:-1]) + "\n"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model_type": "mamba"}, "model_type = 'mamba'; expected one of gpt2, llama"),
        ({"attention_bias": True}, "attention_bias = True; expected False"),
        ({"hidden_act": "relu"}, "hidden_act = 'relu'; expected 'silu'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2}}, "rope_type = 'yarn'"),
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
        ({"num_hidden_layers": 2}, "model.layers.2.input_layernorm.weight is none of the model's"),
        ({"num_hidden_layers": 4}, "has no model.layers.3.self_attn.q_proj.weight"),
        ({"intermediate_size": 64}, "feed.up.weight has shape (48, 32) there; expected (64, 32)"),
        ({"rms_norm_eps": None}, "norm_eps = None"),
    ],
)
def test_what_the_built_in_model_is_not_is_refused(change: dict[str, Any], text: str) -> None:
    saved(THEIRS["llama"])
    path = Path("theirs/config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    result = axrt("import", "--hf", "theirs", "--out", "run")
    assert result.exit_code == 2, result.output
    assert text in result.output
    assert not Path("run").exists()


def test_what_no_family_of_theirs_is_is_refused() -> None:
    Path("tiny.toml").write_text(TINY)
    assert axrt("train", "tiny.toml").exit_code == 0
    result = axrt("export", "out", "--hf", "back")
    assert result.exit_code == 2
    assert "no family of transformers' has this model" in result.output
    assert "feed = 'relu2'" in result.output
    assert not Path("back").exists()


def test_damaged_and_missing_files_are_named() -> None:
    saved(THEIRS["llama"])
    Path("theirs/model.safetensors").write_bytes(b"12")
    result = axrt("import", "--hf", "theirs", "--out", "run")
    assert "theirs/model.safetensors" in result.output
    assert "expected a whole safetensors file" in result.output
    Path("theirs/config.json").unlink()
    result = axrt("import", "--hf", "theirs", "--out", "run")
    assert (result.exit_code, "config.json" in result.output) == (2, True)


def test_a_longer_context_than_theirs_is_refused_and_a_shorter_one_taken() -> None:
    theirs = saved(THEIRS["llama"])
    assert axrt("import", "--hf", "theirs", "--out", "run", "--context", "64").exit_code == 2
    assert axrt("import", "--hf", "theirs", "--out", "run", "--context", "16").exit_code == 0
    assert Config.read("run/config.toml").model.context == 16
    check_same(logits_of("run", TOKENS[:, :16]), theirs(TOKENS[:, :16]).logits)
