"""GGUF files: the same model as the Hugging Face directory that was converted, and what cannot be read is refused."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
import unicodedata
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from typer.testing import CliRunner

from specjax import cli
from specjax.errors import ModelError
from specjax.models.families import FAMILIES, Settings
from specjax.models.gguf.header import read_header
from specjax.models.gguf.tensors import Place, opened
from specjax.models.gguf.tokenizer import SPLITS, Vocabulary, tokenizer_of
from specjax.models.hf import abstract_model, load_model
from specjax.models.rotary import LinearScaling
from tests.models.directories import same_params
from tests.models.gguf_files import add_tokenizer, finish, write_gguf
from tests.models.variants import VARIANTS

SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
"""Rows of whole blocks of 32 numbers."""
_LOCAL = {"rope_type": "default", "rope_theta": 10_000.0}
_WHOLE = {"rope_type": "default", "rope_theta": 700.0}
_SCORES = {"query_pre_attn_scalar": 32}  # the size of a head, which a file has no other number for
READ = {
    "llama": {},
    "llama-tied-biased": {"mlp_bias": False},
    "qwen2": {},
    "qwen3": {},
    "gemma2": _SCORES,
    "gemma3": {
        **_SCORES,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "num_hidden_layers": 6,
        "rope_parameters": {"full_attention": _WHOLE, "sliding_attention": _LOCAL},
    },
    "phi3": {},
}
"""Variant -> settings of it that a file can hold."""


def config_of(variant: str, **changes):
    settings = {**VARIANTS[variant], **SIZES, **changes}
    family = FAMILIES[settings["model_type"]]
    return family.read_config(Settings(settings, "config.json")), family.model_type


@pytest.mark.parametrize("name", READ)
def test_a_file_holds_the_model_that_was_converted(name, tmp_path):
    config, type_ = config_of(name, **READ[name])
    file, model = write_gguf(tmp_path, config, type_)
    loaded = load_model(file)
    assert loaded.config == config
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-7), loaded.params, model.params)
    if not name.startswith("gemma"):  # whose norms are stored with one added
        assert same_params(loaded.params, model.params)
    assert loaded.family == type_
    assert loaded.name == "model"
    assert abstract_model(file).config == config


# --- tensors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_values_are_those_of_the_package(kind, tmp_path):
    config, type_ = config_of("llama")
    file, _ = write_gguf(tmp_path, config, type_, {"proj": kind, "embed": kind})
    loaded, theirs = load_model(file, "float32"), read_by_the_package(file)
    np.testing.assert_array_equal(loaded.params["embedding"], theirs["token_embd.weight"])
    layer = loaded.params["layers"][2]
    np.testing.assert_array_equal(layer["mlp"]["down_proj"]["kernel"], theirs["blk.2.ffn_down.weight"].T)
    stored = theirs["blk.2.attn_q.weight"]
    by_halves = stored.reshape(4, 16, 2, 64).swapaxes(1, 2).reshape(128, 64)
    np.testing.assert_array_equal(layer["attention"]["q_proj"]["kernel"], by_halves.T)
    assert load_model(file, "auto").dtype == jnp.float32


def read_by_the_package(file):
    tensors = gguf.GGUFReader(file).tensors
    return {t.name: gguf.quants.dequantize(t.data, t.tensor_type).reshape(t.shape[::-1]) for t in tensors}


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"])
def test_values_of_types_that_the_package_only_reads(kind, tmp_path):
    """Blocks of random bytes, as the package writes none of these types."""
    of = gguf.GGMLQuantizationType[kind]
    values, size = gguf.GGML_QUANT_SIZES[of]
    rows = np.random.default_rng(0).integers(0, 60, (6, 512 // values * size), np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("some", rows, raw_dtype=of)
    finish(writer)
    header = read_header(tmp_path / "x.gguf")
    with opened(header, {"ours": Place("some", heads=1)}) as stored:
        assert stored["ours"].header() == ((6, 512), "F32")
        found, piece = stored["ours"].value(), stored["ours"].value((slice(1, 3), slice(5, 9)))
    expected = gguf.quants.dequantize(rows, of)[[0, 2, 4, 1, 3, 5]]
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(piece, expected[1:3, 5:9])


def test_a_model_in_several_parts(tmp_path):
    config, type_ = config_of("llama")
    write_gguf(tmp_path, config, type_, split_max_tensors=15)
    whole = tmp_path / "whole"
    whole.mkdir()
    file, _ = write_gguf(whole, config, type_)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert len(parts) == 3
    assert same_params(load_model(parts[0]).params, load_model(file).params)
    with pytest.raises(ModelError, match=r"is part 2 of 3; give the first one, model-00001-of-00003.gguf"):
        load_model(parts[1])
    parts[1].unlink()
    with pytest.raises(ModelError, match=r"one of 3 parts, and there is no model-00002-of-00003.gguf beside it"):
        load_model(parts[0])


# --- settings ---------------------------------------------------------------------------------------------------------


def test_the_rotary_embedding_of_llama_3_comes_from_its_divisors(tmp_path):
    rope = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 8192
    config, type_ = config_of("llama", head_dim=64, rope_parameters={**rope, "rope_theta": 500_000.0})
    plain = LlamaRope(64, 500_000.0)
    file, _ = write_gguf(tmp_path, config, type_, more=lambda w: w.add_tensor("rope_freqs.weight", plain.divisors(8.0)))
    assert load_model(file).config == config
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    file, _ = write_gguf(
        wrong, config, type_, more=lambda w: w.add_tensor("rope_freqs.weight", plain.divisors(8.0) * 2)
    )
    with pytest.raises(ModelError, match=r"rope_freqs.weight holds no scaling of Llama 3's"):
        load_model(file)


def test_a_factor_of_no_type_is_linear(tmp_path):
    config, type_ = config_of("llama")
    file, _ = write_gguf(tmp_path, config, type_, more=lambda w: w.add_rope_scaling_factor(4.0))
    assert load_model(file).config.ropes[0].scaling == LinearScaling(4.0)
    none = tmp_path / "none"
    none.mkdir()
    file, _ = write_gguf(none, config, type_, more=lambda w: w.add_rope_scaling_factor(1.0))
    assert load_model(file).config == config


def test_a_file_that_ends_before_its_divisors_is_cut_short(tmp_path):
    """They are read with the settings, before any weight."""
    config, type_ = config_of("llama", head_dim=64)
    divisors = LlamaRope(64, 10_000.0).divisors(8.0)
    file, _ = write_gguf(tmp_path, config, type_, more=lambda w: w.add_tensor("rope_freqs.weight", divisors))
    start = read_header(file).tensors["rope_freqs.weight"].start
    file.write_bytes(file.read_bytes()[: start + 8])
    with pytest.raises(ModelError, match=r"is cut short: tensor rope_freqs\.weight ends at byte"):
        load_model(file)


@dataclasses.dataclass
class LlamaRope:
    """What llama.cpp's converter makes of Llama 3's scaling (2407.21783)."""

    size: int
    theta: float

    def divisors(self, factor: float, low: float = 1.0, high: float = 4.0, original: int = 8192) -> np.ndarray:
        found = []
        for frequency in 1.0 / self.theta ** (np.arange(0, self.size, 2) / self.size):
            length = 2 * np.pi / frequency
            if length < original / high:
                found.append(1.0)
            elif length > original / low:
                found.append(factor)
            else:
                smooth = (original / length - low) / (high - low)
                found.append(1 / ((1 - smooth) / factor + smooth))
        return np.array(found, np.float32)


REFUSED = {
    "an architecture": (lambda w: w.add_string("general.architecture", "mamba"), "general.architecture='mamba' is not"),
    "a setting": (lambda w: w.add_uint32("llama.expert_count", 8), "llama.expert_count=8 is not implemented"),
    "a scaling": (lambda w: w.add_string("llama.rope.scaling.type", "ntk"), "rope.scaling.type='ntk' is not implem"),
    "a tensor": (lambda w: w.add_tensor("blk.0.extra.weight", np.zeros(4, np.float32)), "unexpected: blk.0.extra.weig"),
    "a type of tokenizer": (
        lambda w: (w.add_tokenizer_model("t5"), w.add_token_list(["a"])),
        "tokenizer.ggml.model='t5' is not read",
    ),
    "a list of sizes": (lambda w: w.add_head_count([4, 2]), "head_count is [4, 2], expected one positive number"),
    "a scaling of attention": (
        lambda w: w.add_float32("llama.rope.scaling.attn_factor", 0.5),
        "llama.rope.scaling.attn_factor=0.5 is not implemented without rope_factors_long",
    ),
    "no heads": (lambda w: w.add_head_count(0), "llama.attention.head_count is 0, expected one positive number"),
    "a merge of unknown tokens": (
        lambda w: (
            w.add_tokenizer_model("gpt2"),
            w.add_tokenizer_pre("gpt-2"),
            w.add_token_list(["a"]),
            w.add_token_merges(["b c"]),
        ),
        "its tokenizer cannot be built (",
    ),
    "a pre-tokenizer": (
        lambda w: (w.add_tokenizer_model("gpt2"), w.add_tokenizer_pre("new"), w.add_token_list(["a"])),
        "tokenizer.ggml.pre='new' is not read; known are gpt-2",
    ),
    "no pre-tokenizer": (
        lambda w: (w.add_tokenizer_model("gpt2"), w.add_token_list(["a"])),
        "tokenizer.ggml.pre=None is not read; convert the model again",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_known_is_refused_by_name(what, tmp_path):
    config, type_ = config_of("llama")
    more, message = REFUSED[what]
    file, _ = write_gguf(tmp_path, config, type_, more=more)
    with pytest.raises(ModelError, match=re.escape(message)) as error:
        load_model(file)
    assert str(file) in str(error.value)


@pytest.mark.parametrize(("kind", "message"), [(999, "has type 999, which is not known"), (26, "is stored as I32")])
def test_a_type_of_tensor_that_is_not_read_is_refused_by_name(kind, message, tmp_path):
    config, type_ = config_of("llama")
    file, _ = write_gguf(tmp_path, config, type_)
    data, name = bytearray(file.read_bytes()), b"blk.0.attn_q.weight"
    place = data.index(name) + len(name)
    place += 4 + 8 * int.from_bytes(data[place : place + 4], "little")  # behind the number of its sizes, and those
    data[place : place + 4] = kind.to_bytes(4, "little")
    file.write_bytes(data)
    with pytest.raises(ModelError, match=f"tensor blk.0.attn_q.weight {message}"):
        load_model(file)


def test_a_damaged_file_is_refused(tmp_path):
    config, type_ = config_of("llama")
    file, _ = write_gguf(tmp_path, config, type_)
    data = file.read_bytes()
    for kept, message in ((10, "no GGUF file"), (300, "its header is damaged at byte"), (-64, "is cut short: tensor")):
        (tmp_path / "cut.gguf").write_bytes(data[:kept])
        with pytest.raises(ModelError, match=message):
            load_model(tmp_path / "cut.gguf")
    for start, message in ((b"PK\3\4", "does not begin with GGUF"), (b"GGUF\0\0\0\3", "big-endian")):
        (tmp_path / "other.gguf").write_bytes(start + data[len(start) :])
        with pytest.raises(ModelError, match=message):
            load_model(tmp_path / "other.gguf")
    for name in ("blk.1.attn_q.weight", "token_embd.weight"):
        renamed = data.replace(name.encode(), name.replace("t", "q").encode())
        (tmp_path / "missing.gguf").write_bytes(renamed)
        with pytest.raises(ModelError, match=f"tensors are missing: {name}; fetch"):
            load_model(tmp_path / "missing.gguf")


# --- tokenizers -------------------------------------------------------------------------------------------------------

OWN = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
}
"""``tokenizer.ggml.pre`` -> the pre-tokenizer in the model's own tokenizer.json."""


def mixed_lines() -> list[str]:
    """2,000 lines of code, prose, numbers, and scripts with and without cases."""
    code = [
        line for file in sorted(Path(os.__file__).parent.glob("*.py"))[:12] for line in file.read_text().splitlines()
    ]
    random = np.random.default_rng(0)
    pieces = [
        "it's",
        "WE'LL",
        "naïve",
        "  ",
        "\t",
        "\n\n",
        "123456",
        "½",
        "Ⅷ",
        "東京都",
        "привет",
        "ΑΒγ",
        "مرحبا",
        "🙂👍🏽",
    ]
    pieces += ["é", "e\u0301", "...", "/r/\r\n", "x_y", "a", "I", " ", "\u00a0", "नमस्ते", "ǅ", "<|end|>", "don't", "1/2"]
    made = ["".join(random.choice(pieces, random.integers(1, 12))) for _ in range(1000)]
    return [*code[:1000], *made]


def trained(split) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=["<|end|>", "<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(mixed_lines(), trainer)
    return tokenizer


@pytest.mark.parametrize("pre", SPLITS)
def test_token_ids_are_those_of_the_same_tokenizer_json(pre, tmp_path):
    """Splits beside those of transformers, where it has them, and beside the model's own."""
    known = importlib.import_module("transformers.integrations.gguf.gguf_tokenizer_mapping").GGUF_PRE_TOKENIZER_SPLITS
    if pre in OWN:
        own = OWN[pre]
    else:
        parts = [pre_tokenizers.Split(Regex(known[pre]), "isolated")]
        own = pre_tokenizers.Sequence([*parts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    theirs = trained(own)
    if SPLITS[pre].nfc:
        theirs.normalizer = normalizers.NFC()
    file = tmp_path / "tokens.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    add_tokenizer(writer, theirs, pre, {"<|end|>", "<s>"})
    writer.add_add_bos_token(False)
    finish(writer)
    ours = tokenizer_of(read_header(file))
    ignoring = SPLITS[pre].whole
    if ignoring:
        theirs.model = models.BPE(vocab=theirs.get_vocab(), merges=merges_of(theirs), ignore_merges=True)
    for line in mixed_lines():
        assert ours(line)["input_ids"] == theirs.encode(line).ids, line
        assert ours.decode(ours(line)["input_ids"]) == (normalized(line) if SPLITS[pre].nfc else line)


@pytest.mark.parametrize(("pre", "ids"), [("llama-bpe", [2]), ("gpt-2", [0, 1])])
def test_a_piece_that_is_a_token_is_taken_whole_where_the_model_does(pre, ids, tmp_path):
    """No merge makes the token."""
    file = tmp_path / "tokens.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    add_tokenizer(writer, Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "ab": 2}, merges=[])), pre, set())
    finish(writer)
    assert tokenizer_of(read_header(file))("ab")["input_ids"] == ids


def normalized(line: str) -> str:
    return unicodedata.normalize("NFC", line)


def merges_of(tokenizer: Tokenizer) -> list[tuple[str, str]]:
    return [tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]


def sentencepiece_like(prefix: bool) -> Tokenizer:
    """As a Llama 2's tokenizer.json (``prefix``) or a Gemma's: words with their spaces, bytes for what is unknown."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    space = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space]) if prefix else space
    special = ["<unk>", "<s>", "</s>", "<end_of_turn>", *(f"<0x{i:02X}>" for i in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=800, special_tokens=special, limit_alphabet=80, show_progress=False)
    tokenizer.train_from_iterator([line for line in mixed_lines() if "  " not in line], trainer)
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    model = models.BPE(
        vocab=tokenizer.get_vocab(), merges=merges_of(tokenizer), unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    made = Tokenizer(model)
    made.normalizer, made.decoder = tokenizer.normalizer, tokenizer.decoder
    made.add_special_tokens(special[:4])
    return made


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_token_ids_of_sentencepiece_are_those_of_the_same_tokenizer_json(architecture, tmp_path):
    theirs = sentencepiece_like(prefix=architecture == "llama")
    tokens = [theirs.id_to_token(i) or "" for i in range(theirs.get_vocab_size())]
    file = tmp_path / "tokens.gguf"
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    # A Gemma's scores say nothing of the order of its merges.
    writer.add_token_scores([-float(i) if architecture == "llama" else float(i) for i in range(len(tokens))])
    writer.add_token_types([2] + [3] * 3 + [6] * 256 + [1] * (len(tokens) - 260))
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if architecture != "llama":
        writer.add_add_space_prefix(False)
    finish(writer)
    ours = tokenizer_of(read_header(file))
    for line in mixed_lines():
        assert ours(line)["input_ids"] == [1, *theirs.encode(line).ids], line
        assert ours.decode(ours(line)["input_ids"][1:]) == theirs.decode(theirs.encode(line).ids)
    assert Vocabulary(read_header(file)).eos_ids == (2, 3)


def test_a_token_that_ends_turns_does_so_as_a_user_defined_one_too(tmp_path):
    """As in many files of Gemma."""
    config, type_ = config_of("qwen3")
    kinds = {"<end_of_turn>": gguf.TokenType.USER_DEFINED, "<b>": gguf.TokenType.USER_DEFINED}

    def more(writer):
        tokens = ["<s>", "</s>", "<end_of_turn>", "<b>", *"abc"]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(tokens)
        writer.add_token_types([kinds.get(t, gguf.TokenType.CONTROL if "s>" in t else 1) for t in tokens])
        writer.add_token_merges([])
        writer.add_eos_token_id(1)

    file, _ = write_gguf(tmp_path, config, type_, more=more)
    loaded = load_model(file)
    assert loaded.eos_ids == (1, 2)
    assert loaded.tokenizer.decode([4, 2, 3, 5], skip_special_tokens=True) == "a<b>b"


def chatting(writer: gguf.GGUFWriter) -> None:
    add_tokenizer(writer, small_tokenizer(), "gpt-2", {"<|end|>", "<s>"})
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_eot_token_id(5)
    writer.add_add_bos_token(True)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}<|end|>{% endfor %}")


def small_tokenizer() -> Tokenizer:
    vocab = {token: i for i, token in enumerate(["<|end|>", "<s>", *"abcdefgh", "ab", "abc"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b"), ("ab", "c")]))
    tokenizer.add_special_tokens(["<|end|>", "<s>"])
    return tokenizer


def test_a_chat_model_is_exported_as_a_directory(tmp_path):
    config, type_ = config_of("qwen3")
    file, _ = write_gguf(tmp_path, config, type_, more=chatting)
    loaded = load_model(file)
    assert loaded.eos_ids == (0, 5)
    assert loaded.tokenizer("abcab<|end|>")["input_ids"] == [1, 11, 10, 0]
    command("export", file, tmp_path / "out")
    exported = load_model(tmp_path / "out")
    assert exported.config == config
    assert exported.eos_ids == (0, 5)
    assert same_params(exported.params, loaded.params)
    for text in ("abcab<|end|>", "cab", ""):
        assert exported.tokenizer(text)["input_ids"] == loaded.tokenizer(text)["input_ids"]
    chat = [{"role": "user", "content": "abc"}]
    assert exported.tokenizer.apply_chat_template(chat, tokenize=False) == "abc<|end|>"


def test_commands_take_a_file_as_target_and_as_draft(tmp_path):
    config, type_ = config_of("qwen3")
    file, _ = write_gguf(tmp_path, config, type_, more=chatting)
    arguments = ["--prompt", "abc", "--max-new-tokens", "4", "--ignore-eos"]
    plain = command("generate", "--target", file, *arguments)
    assert plain.strip()
    assert command("generate", "--target", file, "--draft", file, "--defaults", *arguments) == plain


def command(*arguments) -> str:
    result = CliRunner().invoke(cli.app, [*map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout.split("\n")[0]
