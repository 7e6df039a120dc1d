"""Stored forms of drafts as tables: which key of config.json stands for which field of a draft, and under which name
each weight is stored. One reader and one writer interpret them; what a table cannot say is a function of the form."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from specjax.drafters.features import FeatureModel, LoadedDraft, head_rows, layers_like
from specjax.errors import ModelError
from specjax.formats import torch_file
from specjax.formats.keys import ASKED, AT, EXPERTS, INERT
from specjax.interfaces import Params, TargetInfo
from specjax.models import hf
from specjax.models.config import ModelConfig, Norm
from specjax.models.families import FAMILIES, Family, Settings, family_of
from specjax.models.families.base import Tensor, linear
from specjax.models.families.rope import read_rope
from specjax.models.families.settings import (
    NEUTRAL,
    Field,
    layer_count,
    read_decoder,
    read_window,
    sliding_layers,
    write_fields,
    write_layers,
)
from specjax.models.files import INDEX, WEIGHTS
from specjax.models.vocabulary import DraftVocabulary
from specjax.models.weights import Shapes, StoredTensors, opened, read_params, write_params

LAYERS = "transformer_layer_config"
"""Key of speculators' config.json for the draft's layers."""
OF_TORCH = {WEIGHTS: "pytorch_model.bin", "medusa_lm_head.safetensors": "medusa_lm_head.pt"}
"""Safetensors files -> the files of torch.save that are read if there are none."""
_TABLES = ("^d2t$", "^t2d$", r"^verifier_(lm_head|norm)\.weight$")
"""Names of the tables of ids, and those that speculators gives to weights of the target."""


@dataclasses.dataclass(frozen=True)
class TargetName:
    """Facts about a draft's target that are written beside it."""

    name: str
    layers: int


@dataclasses.dataclass
class Reading:
    """A draft that is being read. ``own``: the object of config.json with the draft's own keys; ``layers``: the layers
    that it describes; ``values``: fields of the draft's spec so far."""

    kind: str
    settings: Settings
    own: Settings
    target: ModelConfig
    stored: StoredTensors
    layers: ModelConfig
    values: dict[str, Any]

    def error(self, text: str) -> ModelError:
        return ModelError(f"{self.settings.where}: {text}")


@dataclasses.dataclass(frozen=True)
class Form:
    """Stored form of one kind of draft. ``names``: what config.json may call it; the first is written. ``tensors``: our
    parameters -> stored ones, beside those of the layers, or a function of the spec that says so."""

    names: tuple[str, ...]
    spec: Any
    fields: tuple[Field, ...]
    tensors: Mapping[str, Tensor] | Callable[[Any], Mapping[str, Tensor]]
    left_out: tuple[str, ...] = ()
    """Parameters that are the target's, and not written."""
    optional: tuple[str, ...] = ()
    """Parameters that a file may hold, or leave to the target; without any, it lacks those ``left_out``."""
    shared: bool = False
    """True: those ``optional`` ones that are the target's are not written."""
    layers: str | None = ""
    """Key with the draft's layers; empty: they are at the top; None: they have the target's sizes."""
    family: str | None = None
    """Model family that has the layers of its class, whatever `model_type` was copied from the target."""
    of_target: bool = False
    """True: the described layers are all of the target's, and the draft has one like the last."""
    layer: str = "layers.{}"
    """Pattern of a layer's name in the names of its tensors."""
    written_layer: str | None = None
    """Such a pattern for writing alone; None: that of reading."""
    own: str = ""
    """Key of an object with keys of the draft's own."""
    own_needed: bool = True
    """False: a file may lack that object."""
    own_known: tuple[str, ...] = ()
    """Keys there that change nothing."""
    own_at: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Keys there that change nothing at this value."""
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of the spec that are the same in all drafts of this form."""
    settle: Callable[[Reading], None] | None = None
    """A function for all that no table says: it sets `Reading.values`, and raises `ModelError` for what is not read."""
    limits: Mapping[str, Callable[[Any], Any]] = dataclasses.field(default_factory=dict)
    """Properties that the form cannot express -> the test that a spec has them."""
    known: tuple[str, ...] = ()
    """Keys that change nothing."""
    unread: tuple[str, ...] = EXPERTS
    """Keys of the layers that the class ignores."""
    meant: Callable[[Mapping[str, Any]], bool] = lambda settings: True
    """Test that a config.json that has one of the names is of this kind."""
    vocabulary: bool = True
    """True: it may have a draft vocabulary."""
    says_rows: bool = False
    """True: the size of the draft vocabulary is written."""
    tables: bool = False
    """True: d2t and t2d are written for a whole vocabulary, too."""
    target_layers: bool = False
    """True: the draft names its target's number of layers."""
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Beginnings of tensor names that some files have -> those of the table."""
    others: tuple[str, ...] = ()
    """Patterns of names that are no weights of the draft."""
    weights: str = WEIGHTS
    """Name of the file."""
    finish: Callable[[Params], Params] | None = None
    """Our parameters, made of the stored ones."""
    also: Callable[[Path, LoadedDraft, str], None] | None = None
    """Writer of more files, called with (directory, draft, dtype)."""


@dataclasses.dataclass(frozen=True)
class Format:
    """A stored form of drafts, with its kinds. ``find(settings)``: the kind and the form that a config.json describes;
    ``around(form, spec, dtype, target)``: keys that are written beside those of the tables; ``refusal``: text of the
    error for a draft that it cannot express."""

    KINDS: Mapping[str, Form]
    find: Callable[[Mapping[str, Any]], tuple[str, Form] | None]
    around: Callable[[Form, Any, str, TargetName], dict[str, Any]] = lambda form, spec, dtype, target: {}
    refusal: str = ""

    def kind_of(self, settings: Mapping[str, Any]) -> str | None:
        """Kind of draft that a config.json describes, see `specjax.formats.kind_of`."""
        found = self.find(settings)
        return None if found is None else found[0]

    def read(
        self, directory: Path, settings: Mapping[str, Any], kind: str, target: TargetInfo, check_finite: bool
    ) -> tuple[FeatureModel, Params]:
        """The draft's spec and weights. Raises `ModelError`."""
        found = self.find(settings)
        assert found is not None
        form, dtype = found[1], str(target.dtype)
        with tensors_of(directory, form.weights) as stored:
            spec = _spec(form, _reading(form, kind, settings, target.config, stored), dtype)
            ends = [name for name in form.optional if _ENDS[name] not in stored] if form.optional else form.left_out
            params = read_params(stored, *_table(form, spec, ends), dtype, check_finite=check_finite)
        return spec, params if form.finish is None else form.finish(params)

    def unsupported(self, spec: FeatureModel, kind: str) -> str | None:
        """The part of a draft that this form cannot express; None: it expresses all."""
        lacking = (text.format(spec) for text, has in self.KINDS[kind].limits.items() if has(spec))
        return next(lacking, None)

    def write(self, directory: Path, draft: LoadedDraft, kind: str, dtype: str, target: TargetName) -> dict[str, Any]:
        """Write the weights; returns config.json. Raises `ModelError` for a draft that this form cannot express."""
        spec, form, lost = draft.spec, self.KINDS[kind], self.unsupported(draft.spec, kind)
        if lost is not None:
            raise ModelError(self.refusal.format(lost))
        fields = {**_described(form, spec), **self.around(form, spec, dtype, target), **write_fields(form.fields, spec)}
        fields |= {"num_target_layers": target.layers} if form.target_layers else {}
        fields |= {"draft_vocab_size": head_rows(spec)} if form.says_rows else {}
        written = dataclasses.replace(form, layer=form.written_layer or form.layer)
        absent = [name for name in form.optional if name not in draft.params] if form.shared else form.left_out
        family, shapes = _table(written, spec, absent)
        tables = _written_tables(spec, form.tables)
        write_params(directory, draft.params, family, shapes, dtype, hf.MAX_SHARD_BYTES, form.weights, tables)
        if form.also is not None:
            form.also(directory, draft, dtype)
        return fields


def named_by(key: str, kinds: Mapping[str, Form], strict: bool = False) -> Callable[[Mapping[str, Any]], Any]:
    """`Format.find` for forms that a key names. ``strict``: True to raise `ModelError` for any other name."""

    def find(settings: Mapping[str, Any]) -> tuple[str, Form] | None:
        for kind, form in kinds.items():
            if key in settings and settings[key] == form.names[0]:
                return kind, form
        if strict and key in settings:
            known = ", ".join(form.names[0] for form in kinds.values())
            raise ModelError(f"config.json: {key}={settings[key]!r} is not read; known are {known}")
        return None

    return find


# --- config.json ----------------------------------------------------------------------------------------------------


def _reading(form: Form, kind: str, values: Mapping[str, Any], target: ModelConfig, stored: StoredTensors) -> Reading:
    """The draft with all that its config.json says. Raises `ModelError`."""
    settings = Settings(values, stored.directory / "config.json")
    own = settings
    if form.own:
        own = settings.objects[form.own] = Settings(
            settings.typed(form.own, dict, None if form.own_needed else {}), settings.where
        )
    layers, known = _layers(form, settings, target)
    reading = Reading(kind, settings, own, target, stored, layers, {})
    if form.of_target:
        reading.layers = dataclasses.replace(layers, num_layers=1, layers=layers.layers[-1:])
        reading.values["reads"] = (layers.num_layers,)
    reading.values |= {**form.fixed, **settings.fields(form.fields, layers, target)}
    if form.settle is not None:
        form.settle(reading)
    mask = reading.values.get("mask_token", 0)
    if mask >= layers.vocab_size:
        raise reading.error(f"mask_token_id={mask}, and the vocabulary has {layers.vocab_size} ids")
    if form.vocabulary:
        reading.values["vocabulary"] = _vocabulary(
            settings, stored, layers.vocab_size, reading.values.get("candidates", 0)
        )
    if form.own:
        refuse_unknown(own, *form.own_known, at=form.own_at)
    refuse_unknown(settings, *known, *form.known)
    return reading


def _layers(form: Form, settings: Settings, target: ModelConfig) -> tuple[ModelConfig, Collection[str]]:
    """(the layers of the draft, or their sizes; the keys at the top that describe them). Raises `ModelError`."""
    if form.layers is None:
        return layers_like(target), ()
    if not form.layers:
        return read_layers(settings, form.family, form.unread)
    values = settings.value(form.layers)
    if not isinstance(values, dict):
        raise ModelError(f"{settings.where}: needs `{form.layers}`, what the draft's layers are")
    algorithm = settings.typed("speculators_config", dict, {}).get("algorithm")
    if algorithm not in (None, *form.names):
        raise ModelError(
            f"{settings.where}: speculators_config.algorithm={algorithm!r}, and the draft is {form.names[0]!r}"
        )
    inner = Settings(values, settings.where)
    layers, known = read_layers(inner)
    refuse_unknown(inner, *known)
    return layers, ()


def _spec(form: Form, reading: Reading, dtype: str) -> FeatureModel:
    """The draft's spec of its fields: those of its layers and of its options are in parts of it."""
    parts: dict[str, dict[str, Any]] = {"": {}, "config": {}, "options": {}}
    for name, value in reading.values.items():
        part, _, field = name.rpartition(".")
        parts[part][field] = value
    layers, fields = reading.layers, parts[""]
    if parts["config"]:
        layers = dataclasses.replace(layers, **parts["config"])
    if parts["options"]:
        try:
            fields["options"] = type(form.spec.options)(**parts["options"])
        except ValueError as error:
            raise reading.error(str(error)) from None
    return form.spec(layers, **{"feature_size": layers.hidden_size, "dtype": dtype, **fields})


def refuse_unknown(settings: Settings, *known: str, at: Mapping[str, Any] | None = None) -> None:
    """Raises `ModelError` for a key that nothing has asked for and that is not ``known``. Keys that change nothing
    pass: those of `INERT` with any value, those of `AT` and ``at`` with the value named there."""
    plain = {**AT, **(at or {})}
    for name in sorted(settings.values.keys() - settings.read - INERT - set(known)):
        value = settings.values[name]
        if value is None or (name in plain and _same(value, plain[name])):
            continue
        if name in ASKED:
            raise ModelError(f"{settings.where}: {ASKED[name]}: the draft says it itself; leave it out")
        if name in plain:
            raise ModelError(f"{settings.where}: {name}={value!r} is not implemented; only {plain[name]!r} is")
        raise ModelError(
            f"{settings.where}: {name}={value!r} is not read; remove it if it changes nothing of what the draft "
            "computes"
        )


def _same(value: Any, plain: Any) -> bool:
    """True if the values are equal; a bool equals no number."""
    return value == plain and isinstance(value, bool) == isinstance(plain, bool)


# --- the layers -----------------------------------------------------------------------------------------------------


def read_layers(
    settings: Settings, family: str | None = None, unread: Collection[str] = ()
) -> tuple[ModelConfig, Collection[str]]:
    """(the layers that the settings describe, the keys that describe them). Where the class named in config.json
    decides the layers, ``family`` is their model family, whatever `model_type` says, and ``unread`` are keys that do
    not describe them. Raises `ModelError`."""
    fields, file = _of_text(settings.values), settings.where
    if family is not None:
        fields = {name: value for name, value in fields.items() if name not in unread}
        fields |= {"tie_word_embeddings": False} if fields.get("tie_word_embeddings") is True else {}
    kind = family or fields.get("model_type")
    found = _FAMILIES[kind] if kind in tuple(_FAMILIES) else family_of(kind, file)
    read: set[str] = set()
    layers = found.read_config(Settings(fields, file, read=read))
    try:
        if found not in _FAMILIES.values():
            described(dataclasses.replace(layers, tie_embeddings=False))
    except ModelError:
        raise ModelError(
            f"{file}: model_type={found.model_type!r}: its layers are none of Llama, Qwen 2 and Qwen 3, and a draft's "
            "are; use a draft of one of those"
        ) from None
    return layers, read | NEUTRAL.keys() | {"layer_types", "partial_rotary_factor", *unread}


def _of_text(values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` without rotary positions of several axes: in a text all axes are equal, as in the plain embedding."""
    plain = dict(values)
    for name in ("rope_scaling", "rope_parameters"):
        rope = values.get(name)
        if isinstance(rope, dict) and any(key.startswith("mrope_") or rope[key] == "mrope" for key in rope):
            plain[name] = {k: x for k, x in rope.items() if not k.startswith("mrope_") and x != "mrope"}
    return plain


def described(layers: ModelConfig) -> dict[str, Any]:
    """The layers as config.json describes them, in the model family that has such layers. Raises `ModelError` for
    layers that are none of llama, qwen2 and qwen3."""
    family = _layers_of(layers)
    return {"model_type": family.model_type, **hf.described(family, layers)}


def _described(form: Form, spec: FeatureModel) -> dict[str, Any]:
    """Keys for the layers; what other keys of the form say of them is left out. Raises `ModelError`."""
    if form.layers is None:
        return {}
    plain = {f.name: f.default for f in dataclasses.fields(ModelConfig)}
    own = [field.ours.removeprefix("config.") for field in form.fields if field.ours.startswith("config.")]
    layers = dataclasses.replace(spec.config, **{name: plain[name] for name in own})
    if form.of_target:
        layers = dataclasses.replace(layers, num_layers=spec.reads[0])
    return {form.layers: described(layers)} if form.layers else described(layers)


def _layers_of(config: ModelConfig) -> Family:
    """The model family that describes layers like ``config``."""
    if config.qkv_bias and not config.o_bias:
        return _FAMILIES["qwen2"]
    return _FAMILIES["qwen3" if config.qk_norm == "head" else "llama"]


def _read_windowed(settings: Settings) -> ModelConfig:
    """Llama's layers with windows, which drafts have and Llama lacks."""
    rope, window = read_rope(settings), read_window(settings)
    return read_decoder(
        settings,
        layers=sliding_layers(settings, rope, window, [False] * layer_count(settings)),
        norm=Norm(eps=settings.number("rms_norm_eps", float, 1e-6)),
        max_positions=2048,
        attention_bias=False,
        mlp_bias=settings.flag("mlp_bias", False),
    )


def _write_windowed(config: ModelConfig) -> dict[str, Any]:
    said = FAMILIES["llama"].write_config(config)
    return {**said, **write_layers(config)} if any(config.windows) else said


_FAMILIES = {
    "llama": dataclasses.replace(FAMILIES["llama"], read_config=_read_windowed, write_config=_write_windowed),
    **{name: FAMILIES[name] for name in ("qwen2", "qwen3")},
}
"""The model families that have a draft's layers."""


# --- tensors --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def tensors_of(directory: Path, weights: str = WEIGHTS) -> Iterator[StoredTensors]:
    """The tensors of a draft's directory, whose files are open meanwhile; those of a file of torch.save if there is no
    other. Raises `ModelError`."""
    held = any((directory / name).exists() for name in (*OF_TORCH, INDEX))
    published = directory / OF_TORCH[weights]
    if not held and published.exists():
        yield torch_file.stored_tensors(published)
        return
    if weights != WEIGHTS and not any((directory / name).exists() for name in (weights, INDEX)):
        raise ModelError(f"{directory}: holds neither {weights} nor {published.name}; fetch it again")
    with opened(directory, weights) as stored:
        yield stored


_END_TENSORS = {"embedding": Tensor("embed_tokens.weight"), **linear("head", "lm_head")}
_ENDS = {"embedding": _END_TENSORS["embedding"].name, "head": _END_TENSORS["head.kernel"].name}


def _table(form: Form, spec: FeatureModel, left_out: Collection[str]) -> tuple[Family, Shapes]:
    """(where each parameter is stored, the parameters that are). A head of a draft vocabulary is always stored: the
    target has no copy of it."""
    layers = {
        ours: dataclasses.replace(tensor, name=tensor.name.replace("model.layers.{}", form.layer))
        for ours, tensor in _layers_of(spec.config).tensors.items()
        if ours.startswith("layers.{}")
    }
    more = form.tensors(spec) if callable(form.tensors) else form.tensors
    own = {ours: dataclasses.replace(x, name=x.name.replace("layers.{}", form.layer)) for ours, x in more.items()}
    absent = [name for name in left_out if name != "head" or spec.vocabulary is None]
    family = dataclasses.replace(
        FAMILIES["llama"],
        tensors={**_END_TENSORS, **layers, **own},
        others=(*(_TABLES if form.vocabulary else ()), *form.others),
        aliases=form.aliases,
    )
    return family, Shapes(spec.config, {name: shape for name, shape in spec.shapes.items() if name not in absent})


def _written_tables(spec: FeatureModel, whole: bool) -> dict[str, np.ndarray] | None:
    """Tables d2t and t2d, which say the draft vocabulary; None: all ids. ``whole``: True to write those of all ids."""
    if spec.vocabulary is not None:
        return {
            "d2t": spec.vocabulary.ids.astype(np.int64) - np.arange(len(spec.vocabulary.ids)),
            "t2d": spec.vocabulary.mask,
        }
    size = spec.config.vocab_size
    return {"d2t": np.zeros(size, np.int64), "t2d": np.ones(size, bool)} if whole else None


def _vocabulary(settings: Settings, stored: StoredTensors, size: int, candidates: int) -> DraftVocabulary | None:
    """The draft vocabulary; None: all ids. Raises `ModelError`."""
    Settings({"vocab_size": size}, settings.where).count("vocab_size")  # checked before arrays of that size are made
    count, directory, tables = settings.count("draft_vocab_size", size), stored.directory, _read_tables(stored)
    if "d2t" in tables:
        offsets = tables["d2t"].astype(np.int64)
        ids = np.arange(len(offsets)) + offsets
    elif count == size:
        ids = np.arange(size)
    else:
        raise ModelError(f"{directory}: draft_vocab_size={count} of {size} ids, and no d2t that says which")
    try:
        vocabulary = DraftVocabulary(ids, size)
    except ValueError as error:
        raise ModelError(f"{directory}: d2t: {error}; they are offsets, id j + d2t[j] for j") from None
    if len(vocabulary.ids) != count:
        raise ModelError(f"{directory}: d2t has {len(vocabulary.ids)} ids, and draft_vocab_size is {count}")
    if "t2d" in tables and not np.array_equal(tables["t2d"], vocabulary.mask):
        wrong = "d2t and t2d name different ids" if "d2t" in tables else "t2d leaves ids out, and no d2t says which"
        raise ModelError(f"{directory}: {wrong}")
    if count != size and candidates:
        raise ModelError(f"{settings.where}: draft_vocab_size={count}; a dflash2 draft chooses among all ids")
    return None if count == size else vocabulary


def _read_tables(stored: StoredTensors) -> dict[str, np.ndarray]:
    """The stored tables: ``d2t`` says by how much each id exceeds its index, ``t2d`` is the mask over all ids. Raises
    `ModelError` for anything else."""
    tables = {name: stored[name].value() for name in ("d2t", "t2d") if name in stored}
    for name, kinds, expected in (("d2t", "iu", "ids"), ("t2d", "biu", "bools")):
        if name in tables and (tables[name].ndim != 1 or tables[name].dtype.kind not in kinds):
            found = f"{tables[name].dtype}{list(tables[name].shape)}"
            raise ModelError(f"{stored.directory}: {name} is {found}; expected a row of {expected}")
    return tables
