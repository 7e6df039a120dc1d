"""Reader and writer of Hugging Face directories; nothing in a directory is ever executed (no pickle, no
``trust_remote_code``).

A directory is read strictly: every tensor is used exactly once, every setting is implemented or refused by name.
`specjax.models.families` says what a family's config.json and tensors mean.

Dims: B rows, T tokens, V vocabulary, D hidden.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int
from safetensors import SafetensorError

from specjax import backend
from specjax.errors import DataError, ModelError
from specjax.interfaces import Params, Target
from specjax.models.checkpoint import Checkpoint, checkpoint_of
from specjax.models.config import ModelConfig
from specjax.models.decode_layout import LaidOut
from specjax.models.families import Family, Settings, family_of
from specjax.models.files import (
    CARD,
    GENERATION,
    MANIFEST,
    check_model,
    flush,
    read_json,
    write_json,
    write_manifest,
)
from specjax.models.kernels import are_quantised, counted
from specjax.models.kernels.quantised import SCHEMES, Scheme
from specjax.models.sharding import usable
from specjax.models.transformer import Model, param_shapes
from specjax.models.weights import AS_STORED, quantised, read_params, write_params

DTYPES = ("float32", "bfloat16", "float16")
DRAFTER = "specjax_drafter"
"""Key of config.json for the kind of a drafter that is no model by itself."""
_EOS = "eos_token_id"
OF_DRAFTS = {"speculators_model_type", "medusa_num_heads", "eagle_config", "dflash_config"}
OF_DRAFTS |= {"draft_vocab_size", "markov_rank", "target_layer_ids", "ptd_token_id"}
"""Keys of config.json that drafts of other trainers have, and no model has."""
MAX_SHARD_BYTES = 5 * 10**9


@dataclasses.dataclass(eq=False, repr=False)
class LoadedModel(LaidOut, Target):
    """A model ready to run, with weights laid out as `Model.init` makes them."""

    spec: Model
    """The static, hashable half: a function of the parameters."""
    params: Params
    """A nested dict of arrays, as `Model.init` makes it."""
    tokenizer: Any = None
    """A Hugging Face tokenizer; None: prompts are token ids, and there is no text."""
    eos_ids: tuple[int, ...] = ()
    """Token ids that end a generation."""
    name: str = "model"
    """Last part of the directory, file or hub id, for messages and model cards."""
    family: str = "llama"
    """The Hugging Face model type that it is saved as."""
    generation: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Settings of the generation_config.json it came with; saved again as they are, except for ``eos_ids``."""
    source: str | None = None
    """The directory, file or hub id that it was loaded from, as the caller gave it."""

    @property
    def config(self) -> ModelConfig:
        """The architecture."""
        return self.spec.config

    @property
    def vocab_size(self) -> int:
        """Number of token ids that the embedding has rows for."""
        return self.config.vocab_size

    @property
    def parameter_count(self) -> int:
        """Number of weights."""
        return counted(jax.eval_shape(lambda: self.params))[0]

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype that it computes in."""
        return jnp.dtype(self.spec.dtype)

    def logits(self, tokens: Int[Array | np.ndarray, "B T"]) -> Float[Array, "B T V"]:
        """float32 logits of the token after each position, without a cache. Compiled once a shape.

        Args:
            tokens: token ids of the vocabulary in one array, no longer than the learned positions.

        Returns:
            Logits ``[B, T, V]``.

        Raises:
            DataError: ``tokens`` is anything else.
        """
        ids = jnp.asarray(_checked_tokens(tokens, self.config), jnp.int32)
        spec, params = (self.spec, self.params) if self.holds_originals else (self.layout().spec, self.layout().params)
        return _logits(spec, params, ids)


def _checked_tokens(tokens: Any, config: ModelConfig) -> Any:
    """Token ids ``[B, T]``; raises `DataError` for anything else. An embedding would take any index, and return the
    nearest row."""
    if isinstance(tokens, Tracer):
        return tokens
    try:
        ids = np.asarray(tokens)
    except ValueError:
        raise DataError("tokens: rows of different lengths; pad them to one length at their ends") from None
    rows = tokens if isinstance(tokens, (list, tuple)) else ()
    if any(isinstance(token, bool) for row in rows if isinstance(row, (list, tuple)) for token in row):
        raise DataError("tokens: a truth value is no token id; give integers [B, T]")
    if ids.dtype.kind not in "iu" and ids.size:
        raise DataError(f"tokens: {ids.dtype} is no type of token ids; give integers [B, T]")
    if ids.ndim != 2 or not ids.size:
        raise DataError(f"tokens: shape {ids.shape}; give token ids [B, T], a list of rows")
    if config.learned_positions and ids.shape[1] > config.max_positions:  # rotary positions go on
        raise DataError(f"tokens: {ids.shape[1]} of them in a row, the model has {config.max_positions} positions")
    wrong = np.argwhere((ids < 0) | (ids >= config.vocab_size))
    if len(wrong):
        row, at = wrong[0]
        found = f"row {row}, position {at}: token id {ids[row, at]}"
        raise DataError(f"tokens: {found} is outside the vocabulary of {config.vocab_size}")
    return ids


@functools.partial(jax.jit, static_argnums=0)
def _logits(spec: Model, params: Params, tokens: Array) -> Array:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    return spec(params, tokens, positions).logits.astype(jnp.float32)


# --- reading --------------------------------------------------------------------------------------------------------


def load_model(
    path_or_hub_id: str | os.PathLike,
    dtype: str | None = None,
    revision: str | None = None,
    mesh: Mesh | None = None,
    check_finite: bool = True,
    quantize: str | None = None,
    kv_cache: str | None = None,
    decoding_only: bool = False,
) -> LoadedModel:
    """Load a Hugging Face directory, a hub id (downloaded to the hub's cache; without a network, read from there), or a
    GGUF file.

    NaN and infinite weights are refused, in one pass over them where they lie. The host holds one parameter at a time
    beside those already on their devices. A directory with a ``SHA256SUMS`` is checked against it first.

    Args:
        path_or_hub_id: a directory, a GGUF file, or an id such as ``org/name``.
        dtype: dtype that weights are cast to; None: float32 on CPU, bfloat16 on accelerators; "auto": as they are
            stored.
        revision: branch, tag or commit of a hub id.
        mesh: mesh with some of the axes ``data``, ``fsdp`` and ``tensor``, over which `specjax.models.sharding` spreads
            the weights.
        check_finite: False accepts NaN and infinite weights.
        quantize: "int8" or "int4", the form that kernels are stored in (`specjax.models.kernels.quantised`); None: in
            ``dtype``. A quantised target is another model, a quantised draft only another draft.
        kv_cache: "int8": keys and values of decoding in 8 bits, each vector with a scale, which makes another model,
            too. None: in ``dtype``.
        decoding_only: True holds the weights once, as decoding reads them: on a CPU in bfloat16 where the file does,
            though float32 is computed. ``params`` is then made of them at each use, which costs time and memory.

    Returns:
        The model, with its tokenizer if it has one.

    Raises:
        ModelError: an argument cannot be used, or a file, setting or tensor cannot be read; the message names it.
    """
    dtype, scheme, kv_cache = _known_dtype(dtype), scheme_of(quantize), _known_cache(kv_cache)
    mesh = None if mesh is None else usable(mesh)
    checkpoint = checkpoint_of(path_or_hub_id, revision)
    checkpoint.check()
    settings, family, config = _described(checkpoint)
    # Quick checks come before the weights, which take long.
    generation = checkpoint.generation
    eos_ids = _read_eos_ids(checkpoint.generation_file, generation, settings, family, config.vocab_size)
    tokenizer = checkpoint.tokenizer()
    narrow = decoding_only and mesh is None and keeps_bfloat16(dtype, scheme)
    with checkpoint.opened() as stored:
        params = read_params(stored, family, config, dtype, mesh, check_finite, scheme, narrow)
    computed = str(params["embedding"].dtype) if dtype == AS_STORED else dtype
    model = LoadedModel(
        spec=Model(config, computed, cache_dtype=kv_cache),
        params=params,
        tokenizer=tokenizer,
        eos_ids=eos_ids,
        name=_named(checkpoint.name, quantize, kv_cache),
        family=family.saved_as or family.model_type,
        generation=generation,
        source=str(path_or_hub_id),
    )
    del params  # of which the layout is made
    if decoding_only:
        model.free_originals()
    return model


def keeps_bfloat16(dtype: str, scheme: Scheme | None = None) -> bool:
    """True if weights that only decode in ``dtype`` stay in bfloat16 where they are stored so."""
    return dtype == "float32" and scheme is None and backend.transposes_kernels()


def abstract_model(
    path_or_hub_id: str | os.PathLike,
    dtype: str | None = None,
    revision: str | None = None,
    kv_cache: str | None = None,
) -> LoadedModel:
    """The model with shapes in place of weights and without tokenizer, to count its memory before it is loaded.

    Args:
        path_or_hub_id: as for `load_model`; of a hub id only config.json is fetched.
        dtype: as for `load_model`; "auto": the dtype that config.json names.
        revision: as for `load_model`.
        kv_cache: as for `load_model`.

    Returns:
        The model, which does not run.

    Raises:
        ModelError: as `load_model`, for what config.json holds.
    """
    dtype, kv_cache = _known_dtype(dtype), _known_cache(kv_cache)
    checkpoint = checkpoint_of(path_or_hub_id, revision, ["config.json"])
    settings, family, config = _described(checkpoint)
    if dtype == AS_STORED:
        stored = settings.values.get("dtype") or settings.values.get("torch_dtype")
        dtype = stored if stored in DTYPES else backend.default_dtype()
    model = Model(config, dtype, cache_dtype=kv_cache)
    shapes = param_shapes(model)
    return LoadedModel(model, shapes, name=checkpoint.name, family=family.saved_as or family.model_type)


def _named(name: str, quantize: str | None, kv_cache: str | None) -> str:
    """Name of a model; a suffix tells a quantised one, which is another model."""
    return "-".join([name, *([quantize] if quantize else []), *([f"kv-{kv_cache}"] if kv_cache else [])])


def _known_cache(dtype: str | None) -> str | None:
    if dtype not in (None, "int8"):
        raise ModelError(f"kv_cache={dtype!r} is unknown; use 'int8', or None")
    return dtype


def _known_dtype(dtype: str | None) -> str:
    dtype = backend.default_dtype() if dtype is None else dtype
    if dtype not in (*DTYPES, AS_STORED):
        raise ModelError(f"dtype={dtype!r} is unknown; use one of {', '.join((*DTYPES, AS_STORED))}")
    return dtype


def _described(checkpoint: Checkpoint) -> tuple[Settings, Family, ModelConfig]:
    """(settings, family, config) of a checkpoint. Raises `ModelError` for one that is no model."""
    settings = checkpoint.settings
    _refuse_stored_quantised(settings)
    kind = settings.values.get(DRAFTER)
    if kind is not None or any(settings.values.get(name) is not None for name in OF_DRAFTS):
        raise ModelError(
            f"{checkpoint.where}: is a {f'{kind!r} ' if kind else ''}draft, no model; "
            "specjax.load_drafter(DIRECTORY, target) loads it"
        )
    family = family_of(settings.values.get("model_type"), settings.where)
    return settings, family, family.read_config(settings)


def _refuse_stored_quantised(settings: Settings) -> None:
    """Raises `ModelError` for a checkpoint whose weights are stored in few bits, whatever the format."""
    stored = settings.values.get("quantization_config") or settings.values.get("compression_config")
    if stored:
        method = stored.get("quant_method") if isinstance(stored, dict) else None
        raise ModelError(
            f"{settings.where}: its weights are stored quantised ({method or 'quantization_config'}), which is not "
            "read; load the checkpoint that it was made from, with quantize='int8' or 'int4' to store it so in memory"
        )


def scheme_of(name: str | None) -> Scheme | None:
    """Scheme of that name, None for None. Raises `ModelError` for an unknown one."""
    if name is not None and name not in SCHEMES:
        raise ModelError(f"quantize={name!r} is unknown; use one of {', '.join(SCHEMES)}, or None")
    return None if name is None else SCHEMES[name]


def quantize_model(model: LoadedModel, quantize: str) -> LoadedModel:
    """A copy of a loaded model with kernels in few bits, which shares all else: a draft for the model itself, say.

    Args:
        model: a model that `load_model` returned.
        quantize: "int8" or "int4".

    Returns:
        The quantised model.

    Raises:
        ModelError: ``quantize`` is unknown, or the model is quantised already.
    """
    scheme = scheme_of(quantize)
    refuse_quantised(model.params, "quantize_model")

    def stored(path: tuple[Any, ...], leaf: Any) -> Any:
        return quantised(tuple(key.key for key in path), leaf, scheme)

    params = jax.tree_util.tree_map_with_path(stored, model.params)
    return dataclasses.replace(model, params=params, name=f"{model.name}-{quantize}")


def refuse_quantised(params: Params, what: str) -> None:
    """Raises `ModelError` for quantised weights where those of the checkpoint are needed."""
    if are_quantised(params):
        raise ModelError(f"{what}: needs the model's weights as they are stored; load it without quantize")


def _read_eos_ids(
    file: Path, generation: Mapping[str, Any], settings: Settings, family: Family, vocab_size: int
) -> tuple[int, ...]:
    """Token ids that end a text: from generation_config.json if it names them, because transformers stops on them, else
    from config.json, else the family's default. Null means that nothing ends a text."""
    both = ((file, generation), (settings.where, settings.values))
    where, said = next(((place, found) for place, found in both if _EOS in found), (file, None))
    if said is None:
        return () if family.eos_id is None or family.eos_id >= vocab_size else (family.eos_id,)
    value = said[_EOS]
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise ModelError(f"{where}: eos_token_id={value!r} should be token ids in 0 .. {vocab_size - 1}")
    return tuple(dict.fromkeys(ids))


# --- writing --------------------------------------------------------------------------------------------------------


def save_model(
    model: LoadedModel,
    directory: str | os.PathLike,
    *,
    dtype: str | None = None,
    overwrite: bool = False,
    card: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a Hugging Face directory that `load_model`, transformers and vLLM read, with a ``SHA256SUMS`` manifest. The
    directory appears complete or not at all; with ``overwrite`` the old one stays until the new one is in place.

    Args:
        model: the model.
        directory: where to write it.
        dtype: dtype of the stored weights; None: the model's own.
        overwrite: replace a model directory that is there.
        card: text of the README.md; None: a short one.
        max_shard_bytes: weights of more bytes go to several files, of which the host holds one at a time.

    Raises:
        ModelError: the directory exists and ``overwrite`` is not set, what is there is not a model directory, other
            processes hold a part of the weights, an argument cannot be used, or the disk takes no more.
    """
    check_model(model, "save_model")
    refuse_quantised(model.params, "save_model")
    dtype = dtype or str(model.dtype)
    if dtype not in DTYPES:
        raise ModelError(f"dtype={dtype!r} is unknown; use one of {', '.join(DTYPES)}")
    if max_shard_bytes < 1:
        raise ModelError(f"max_shard_bytes={max_shard_bytes} should be positive")
    if not all(getattr(leaf, "is_fully_addressable", True) for leaf in jax.tree.leaves(model.params)):
        raise ModelError(
            f"{directory}: other processes hold a part of the weights; gather them in all processes with "
            "jax.experimental.multihost_utils.process_allgather(params, tiled=True), and save in one"
        )
    write_directory(directory, overwrite, lambda partial: _write_files(model, partial, dtype, card, max_shard_bytes))


def write_directory(directory: str | os.PathLike, overwrite: bool, write: Callable[[Path], None]) -> None:
    """Write a new directory with the files that ``write`` makes and a ``SHA256SUMS``, and put it in the place of
    ``directory``: complete or not at all. Raises `ModelError` as `save_model` does."""
    final = check_replaceable(directory, overwrite)
    token = secrets.token_hex(4)
    partial, old = (final.with_name(f".{final.name}.{kind}-{token}") for kind in ("partial", "old"))
    try:
        partial.mkdir(parents=True)
        write(partial)
        mode = (partial / "config.json").stat().st_mode & 0o777
        for file in partial.iterdir():  # safetensors lets only the owner read, whatever the umask
            file.chmod(mode)
        write_manifest(partial)
        flush(*partial.iterdir(), partial)  # else a power cut may leave the name without content
        try:
            if final.exists():
                final.rename(old)
            partial.rename(final)
        except BaseException:  # also for an interrupt: put the old directory back
            if old.exists() and not final.exists():
                old.rename(final)
            raise
        flush(final.parent)
    except (OSError, SafetensorError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"{final}: cannot be written ({reason}); make room there, or choose another place") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if final.exists():
            shutil.rmtree(old, ignore_errors=True)


def check_replaceable(directory: str | os.PathLike, overwrite: bool) -> Path:
    """Absolute path of the directory that `save_model` will write. Raises `ModelError` if it may not be replaced."""
    final = Path(directory).expanduser().resolve()
    if not final.exists():
        return final
    if not overwrite:
        remedy = "choose another directory, or replace it with overwrite=True (--overwrite)"
        raise ModelError(f"{final}: exists already; {remedy}")
    entries = list(final.iterdir()) if final.is_dir() else None
    if entries is None or any(not e.is_file() for e in entries) or (entries and not (final / "config.json").exists()):
        raise ModelError(f"{final}: is not a plain model directory, so it is not replaced; remove it yourself first")
    return final


def _write_files(model: LoadedModel, directory: Path, dtype: str, card: str | None, max_shard_bytes: int) -> None:
    family, config, tokenizer = family_of(model.family, directory), model.config, model.tokenizer
    settings = described(family, config)
    write_params(directory, model.params, family, config, dtype, max_shard_bytes)
    if model.spec.vocabulary is not None:
        model.spec.vocabulary.write(directory)
    special = {
        # Written even when null: in config.json an absent id means the family's default, not none.
        "bos_token_id": getattr(tokenizer, "bos_token_id", None),
        "eos_token_id": model.eos_ids[0] if len(model.eos_ids) == 1 else list(model.eos_ids) or None,
        "pad_token_id": getattr(tokenizer, "pad_token_id", None),
    }
    named = {"architectures": [family.architecture], "model_type": family.model_type, "dtype": dtype}
    write_json(directory / "config.json", {**named, "torch_dtype": dtype, **settings, **special}, published=True)
    told = {name: value for name, value in special.items() if value is not None}
    inherited = {name: value for name, value in model.generation.items() if name != "eos_token_id"}
    write_json(directory / GENERATION, {**told, **inherited}, published=True)
    if tokenizer is not None:
        try:
            tokenizer.save_pretrained(directory)
        except Exception as error:  # the tokenizers library raises plain Exception, for a full disk as well
            raise OSError(f"the tokenizer: {error}") from error
        _rename_tokenizer_class(directory / "tokenizer_config.json")
    (directory / CARD).write_text(card if card is not None else _default_card(model), encoding="utf-8")


def check_saveable(family: str, config: ModelConfig) -> None:
    """Raises `ModelError` unless `save_model` can write a model of ``config`` as ``family``."""
    described(family_of(family, "config.json"), config)


def described(family: Family, config: ModelConfig) -> dict[str, Any]:
    """Settings of config.json except for token ids. Raises `ModelError` for a config that the family has no settings
    for."""
    described: dict[str, Any] = {}
    try:
        described = family.write_config(config)
        again = family.read_config(Settings(described, "config.json"))
        lost = ", ".join(
            f.name for f in dataclasses.fields(config) if getattr(again, f.name) != getattr(config, f.name)
        )
    except ValueError as error:  # a value that it cannot write, or cannot read again
        lost = str(error)
    if lost:
        raise ModelError(
            f"this model cannot be saved as {family.model_type!r}, whose config.json does not hold all that it is "
            f"({lost}); set LoadedModel.family to the family it comes from"
        )
    return described


def _rename_tokenizer_class(file: Path) -> None:
    """Name the tokenizer class as transformers 4 knows it; transformers 5 reads both names."""
    if file.exists():
        settings = read_json(file)
        if settings.get("tokenizer_class") == "TokenizersBackend":
            write_json(file, {**settings, "tokenizer_class": "PreTrainedTokenizerFast"}, published=True)


def _default_card(model: LoadedModel) -> str:
    config = model.config
    return (
        f"---\nlibrary_name: transformers\npipeline_tag: text-generation\n---\n\n# {model.name}\n\n"
        f"A decoder of the {model.family} family with {model.parameter_count:,} parameters: "
        f"{config.num_layers} layers, hidden size {config.hidden_size}, {config.num_heads} heads "
        f"({config.num_kv_heads} key-value), vocabulary {config.vocab_size}, {config.max_positions} positions. "
        f"Written by specjax; check the files with `sha256sum -c {MANIFEST}`.\n"
    )
