"""Every family against transformers on torch, float32: logits, greedy text, gradients, what is saved. Needs the
`parity` extra (torch)."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import transformers
from safetensors.numpy import load_file
from transformers.activations import ACT2FN

import specjax
from specjax.models.families import family_of
from specjax.models.families.settings import ACTIVATIONS as NAMED
from specjax.models.hf import LoadedModel
from specjax.models.layers import ACTIVATIONS
from specjax.models.transformer import Model
from specjax.models.weights import WEIGHTS, write_params
from tests.models.variants import LENGTH, OLD, VARIANTS, in_old_spelling

TOLERANCE = 2e-4
"""Largest difference of a logit, in standard deviations of all logits."""
PROMPT, NEW = 12, 32
DYNAMIC_PAST = "llama-dynamic-past"
KNOWN_AS: dict[str, str] = {"mimo": "qwen2"}
"""What transformers has under another name, since its own code comes with the checkpoint."""
CHECKPOINTS = tempfile.TemporaryDirectory()


@dataclasses.dataclass(frozen=True)
class Pair:
    theirs: Any
    ours: LoadedModel
    directory: Path


@functools.cache
def pair(variant: str) -> Pair:
    """A checkpoint with random weights, norms and biases, written by transformers and read by both."""
    settings: dict[str, Any] = dict(VARIANTS[variant])
    model_type = settings.pop("model_type")
    config = transformers.AutoConfig.for_model(str(KNOWN_AS.get(model_type, model_type)), **settings)
    config._attn_implementation = "eager"
    theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(sum(map(ord, variant)))
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if "norm" in name or ".ln_" in name:
                weight.add_(0.3 * noise)
            elif name.endswith("bias"):
                weight.copy_(0.3 * noise)
            elif "embed" in name or "wte" in name or "wpe" in name:
                weight.copy_(0.4 * noise)
            else:
                fan_in = weight.shape[0] if settings.get("n_embd") and "lm_head" not in name else weight.shape[-1]
                weight.copy_(1.5 * fan_in**-0.5 * noise)
    directory = Path(CHECKPOINTS.name) / variant
    theirs.save_pretrained(directory)
    if model_type in KNOWN_AS:
        file = directory / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "model_type": model_type}))
    return Pair(theirs, specjax.load_model(directory), directory)


def tokens(variant: str, rows: int = 2) -> np.ndarray:
    return np.random.default_rng(7).integers(0, VARIANTS[variant]["vocab_size"], (rows, LENGTH)).astype(np.int32)


def their_logits(model: transformers.PreTrainedModel, fed: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(fed, dtype=torch.long)).logits.numpy()


def error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / expected.std())


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_transformers(variant, record_property):
    fed = tokens(variant)
    expected = their_logits(pair(variant).theirs, fed)
    found = error(np.asarray(pair(variant).ours.logits(fed)), expected)
    record_property("error", found)
    print(f"{variant}: {found:.1e} of a std of {expected.std():.2f}")
    assert expected.std() > 0.9
    assert found < TOLERANCE


def greedy_text(variant: str, drafter) -> tuple[list[int], specjax.GenerationResult]:
    """(transformers', ours); the penalty keeps tiny models from saying one thing again and again."""
    prompt, options = tokens(variant, 1)[:, :PROMPT], {"max_new_tokens": NEW, "repetition_penalty": 4.0}
    with torch.no_grad():
        theirs = pair(variant).theirs.generate(torch.tensor(prompt, dtype=torch.long), do_sample=False, **options)
    decoder = specjax.Decoder(pair(variant).ours, drafter=drafter)
    return theirs[0, PROMPT:].tolist(), decoder.generate(prompt.tolist(), temperature=0.0, **options)


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != DYNAMIC_PAST])
def test_greedy_text_is_that_of_transformers(variant):
    expected, result = greedy_text(variant, specjax.NGram(k=3))
    assert result.tokens[0] == expected
    assert len(set(expected)) > 5


@pytest.mark.parametrize("variant", ["gemma3", "phi3-longrope-long", "gpt2"])
def test_a_draft_equal_to_its_target_is_always_accepted(variant):
    expected, result = greedy_text(variant, specjax.DraftModel(pair(variant).ours, k=3))
    assert result.tokens[0] == expected
    assert "corrected" not in result.origins[0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_transformers_reads_what_is_saved(variant, tmp_path):
    specjax.save_model(pair(variant).ours, tmp_path, overwrite=True)
    renamed = VARIANTS[variant]["model_type"] in KNOWN_AS
    reader: Any = type(pair(variant).theirs) if renamed else transformers.AutoModelForCausalLM
    again, info = reader.from_pretrained(tmp_path, output_loading_info=True, attn_implementation="eager")
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(again) is type(pair(variant).theirs)
    fed = tokens(variant)
    assert error(their_logits(again.eval(), fed), their_logits(pair(variant).theirs, fed)) < 1e-6
    assert specjax.load_model(tmp_path).config == pair(variant).ours.config


@pytest.mark.parametrize("name", NAMED)
def test_activations_are_those_of_transformers(name):
    x = np.linspace(-6, 6, 400, dtype=np.float32)
    expected = ACT2FN[name](torch.tensor(x)).numpy()
    np.testing.assert_allclose(ACTIVATIONS[NAMED[name]](x), expected, atol=1e-6)


def test_the_text_part_of_a_model_that_also_sees(tmp_path):
    sees = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    sees |= {"model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14}
    parts = {"text_config": VARIANTS["gemma3"], "vision_config": sees}
    config = transformers.Gemma3Config(**parts, mm_tokens_per_image=4)
    theirs = transformers.Gemma3ForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    theirs.save_pretrained(tmp_path)
    fed = tokens("gemma3")
    ours = specjax.load_model(tmp_path)
    assert error(np.asarray(ours.logits(fed)), their_logits(theirs, fed)) < TOLERANCE
    assert ours.config == pair("gemma3").ours.config


@pytest.mark.parametrize("variant", OLD)
def test_both_read_old_spellings_as_the_same_model(variant, tmp_path):
    shutil.copytree(pair(variant).directory, tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(in_old_spelling(variant)))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    fed = tokens(variant)
    assert error(their_logits(theirs, fed), their_logits(pair(variant).theirs, fed)) < 1e-6
    assert specjax.load_model(tmp_path).config == pair(variant).ours.config


@pytest.mark.parametrize("variant", ["gemma2", "gpt_neox", "mixtral"])
def test_gradients_are_those_of_torch(variant, tmp_path):
    """Of the mean cross-entropy, written as a checkpoint, so that tensors are compared as they are stored."""
    theirs, ours = pair(variant).theirs, pair(variant).ours
    fed = tokens(variant)
    theirs.zero_grad()
    theirs(torch.tensor(fed, dtype=torch.long), labels=torch.tensor(fed, dtype=torch.long)).loss.backward()

    def loss(params):
        positions = jnp.broadcast_to(jnp.arange(LENGTH, dtype=jnp.int32)[None], fed.shape)
        logits = ours.spec(params, jnp.asarray(fed), positions).logits[:, :-1]
        distributions = jax.nn.log_softmax(logits, axis=-1)
        return -jnp.mean(jnp.take_along_axis(distributions, jnp.asarray(fed)[:, 1:, None], axis=-1))

    gradients, family = jax.jit(jax.grad(loss))(ours.params), family_of(ours.family, "")
    write_params(tmp_path, gradients, family, ours.config, "float32", 2**40)
    found = load_file(tmp_path / WEIGHTS)
    names = {"embed_out.": "lm_head.", ".block_sparse_moe.": ".mlp."}
    expected = {name: weight.grad.numpy() for name, weight in theirs.named_parameters() if "experts" not in name}
    for name, gradient in found.items():
        for stored, held in names.items():
            name = name.replace(stored, held)
        if "experts" in name:  # transformers holds them stacked
            layer, expert, which = re.findall(r"layers\.(\d+)\..*experts\.(\d+)\.(w\d)", name)[0]
            experts = theirs.model.layers[int(layer)].mlp.experts
            gate, up = experts.gate_up_proj.grad[int(expert)].chunk(2)
            reference = {"w1": gate, "w3": up, "w2": experts.down_proj.grad[int(expert)]}[which].numpy()
        else:
            reference = expected.pop(name)
        np.testing.assert_allclose(gradient, reference, rtol=0, atol=TOLERANCE * max(np.abs(reference).max(), 1e-3))
    assert not expected


def layers(**changes):
    """Every layer that has such a setting, with another value of it."""

    def changed(config):
        kinds = (k if getattr(k, n) is None else dataclasses.replace(k, **{n: f(getattr(k, n))}) for k in config.layers)
        return {"layers": tuple(kinds)}

    ((n, f),) = changes.items()
    return changed


def rope(**changes):
    return layers(rope=lambda rope: dataclasses.replace(rope, **changes))


def scaling(**changes):
    return layers(rope=lambda rope: dataclasses.replace(rope, scaling=dataclasses.replace(rope.scaling, **changes)))


def norm(**changes):
    return lambda config: {"norm": dataclasses.replace(config.norm, **changes)}


def field(**changes):
    return lambda config: changes


MUTANTS = {
    "window + 1": ("mistral-window", layers(window=lambda window: window + 1)),
    "window - 1": ("gemma3", layers(window=lambda window: window - 1)),
    "windows everywhere": ("qwen2-window", lambda config: {"layers": (config.layers[-1],)}),
    "rotary everywhere": ("smollm3", lambda config: {"layers": (config.layers[0],)}),
    "local base for all": ("gemma3", rope(theta=20.0)),
    "theta": ("llama", rope(theta=101.0)),
    "halves, not neighbours": ("cohere", rope(interleaved=False)),
    "partial": ("gpt_neox", rope(partial=0.5)),
    "linear factor": ("llama-linear", scaling(factor=3.1)),
    "llama3 ramp": ("llama-llama3", scaling(high_frequency_factor=4.5)),
    "yarn ramp": ("llama-yarn", scaling(beta_slow=0.3)),
    "yarn attention factor": ("llama-yarn", scaling(attention_factor=1.0)),
    "yarn truncation": ("llama-yarn-all", scaling(truncate=True)),
    "dynamic factor": ("llama-dynamic-past", scaling(factor=2.9)),
    "longrope boundary": ("phi3-longrope-long", scaling(original_positions=40)),
    "longrope attention factor": ("phi3-longrope-long", scaling(attention_factor=1.0)),
    "offset": ("gemma2", norm(offset=0.0)),
    "eps": ("olmo2", norm(eps=1e-2)),
    "attention soft cap": ("gemma2", field(attention_soft_cap=None)),
    "logit soft cap": ("gemma2", field(logit_soft_cap=None)),
    "attention scale": ("gemma2", field(attention_scale=None)),
    "embedding multiplier": ("gemma", field(embedding_multiplier=1.0)),
    "residual multiplier": ("granite", field(residual_multiplier=1.0)),
    "logit multiplier": ("cohere", field(logit_multiplier=1.0)),
    "sequential": ("gpt_neox", field(residual="sequential")),
    "parallel": ("gpt_neox-sequential", field(residual="parallel")),
    "gelu": ("gpt_neox", field(activation="gelu_tanh")),
    "expert weights": ("qwen3_moe", lambda c: {"experts": dataclasses.replace(c.experts, normalised=False)}),
    "one expert": ("qwen3_moe", lambda c: {"experts": dataclasses.replace(c.experts, top_k=1)}),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_parity_would_notice(name):
    variant, change = MUTANTS[name]
    ours = pair(variant).ours
    mutant = dataclasses.replace(ours, spec=Model(dataclasses.replace(ours.config, **change(ours.config))))
    fed = tokens(variant)
    found = error(np.asarray(mutant.logits(fed)), their_logits(pair(variant).theirs, fed))
    print(f"{name}: {found:.1e}")
    # An activation and its approximation are that close.
    assert found > (2 if name == "gelu" else 20) * TOLERANCE
