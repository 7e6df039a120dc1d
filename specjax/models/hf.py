"""Hugging Face directories in and out; nothing in a directory is ever executed (no pickle, no ``trust_remote_code``).

A directory is read strictly: every tensor is used exactly once, every setting is implemented or refused by name. A
family (here: Llama) is one `Family`: how its config.json reads, and a table of tensor names.

Dims: B rows, T tokens, V vocabulary, D hidden.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import re
import secrets
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from jaxtyping import Array, Float, Int
from safetensors.numpy import save_file

from specjax.errors import ModelError
from specjax.models.config import ModelConfig
from specjax.models.families import FAMILIES, LLAMA, Family, Settings, Slot, slots_of
from specjax.models.files import MANIFEST, read_json, verify_manifest, write_json, write_manifest
from specjax.models.transformer import Model
from specjax.types import Params

DTYPES = ("float32", "bfloat16", "float16")
CARD, WEIGHTS, INDEX = "README.md", "model.safetensors", "model.safetensors.index.json"
_TOKENIZER_DATA = ("tokenizer.json", "tokenizer.model", "vocab.json")
_HUB_FILES = (
    *("*.safetensors", INDEX, "config.json", "generation_config.json"),
    *(*_TOKENIZER_DATA, "merges.txt", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json"),
)
_STORED_FLOATS = ("F64", "F32", "F16", "BF16")
_NO_PICKLE = "pickle formats (.bin, .pt, .pth, .ckpt) are never read, because unpickling runs code from the file"


@dataclasses.dataclass(eq=False)
class LoadedModel:
    """A model ready to run: ``spec`` is static and hashable, ``params`` a nested dict of arrays (as `Model.init`)."""

    spec: Model
    params: Params
    tokenizer: Any = None
    eos_ids: tuple[int, ...] = ()
    """Token ids that end a generation."""
    name: str = "model"

    @property
    def config(self) -> ModelConfig:
        return self.spec.config

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def dtype(self) -> jnp.dtype:
        """Of the weights."""
        return self.params["embedding"].dtype

    def logits(self, tokens: Int[Array | np.ndarray, "B T"]) -> Float[Array, "B T V"]:
        """float32 logits of the token after each position, without a cache. Compiled once a shape."""
        return _logits(self.spec, self.params, jnp.asarray(tokens, jnp.int32))


@functools.partial(jax.jit, static_argnums=0)
def _logits(spec: Model, params: Params, tokens: Array) -> Array:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    return spec(params, tokens, positions).logits.astype(jnp.float32)


# --- reading --------------------------------------------------------------------------------------------------------


def load_model(path_or_hub_id: str | os.PathLike, dtype: str = "float32", revision: str | None = None) -> LoadedModel:
    """A Hugging Face directory, or a hub id (downloaded to the hub's cache), with weights cast to ``dtype``.

    ``revision``: branch, tag or commit of a hub id. A directory with a ``SHA256SUMS`` is checked against it first.
    Raises `ModelError` naming the file, setting or tensor that cannot be read.
    """
    if dtype not in DTYPES:
        raise ModelError(f"dtype={dtype!r} is unknown; use one of {', '.join(DTYPES)}")
    directory = _resolve(path_or_hub_id, revision)
    verify_manifest(directory, ignored=(CARD,))  # the card may be edited freely
    config_file = directory / "config.json"
    settings = Settings(read_json(config_file), config_file)
    kind = settings.values.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ModelError(f"{config_file}: model_type={kind!r} is not implemented; known are {', '.join(FAMILIES)}")
    config = FAMILIES[kind].read_config(settings)
    return LoadedModel(
        spec=Model(config),
        params=_read_params(directory, FAMILIES[kind], config, dtype),
        tokenizer=_read_tokenizer(directory),
        eos_ids=_read_eos_ids(directory, settings, config.vocab_size),
        name=Path(path_or_hub_id).name or directory.name,
    )


def _resolve(path_or_hub_id: str | os.PathLike, revision: str | None) -> Path:
    path = Path(path_or_hub_id).expanduser()
    if path.is_dir():
        if revision is not None:
            raise ModelError(f"{path}: revision={revision!r} needs a hub id, and this is a local directory; drop one")
        return path
    if path.exists():
        raise ModelError(f"{path}: is a file; give the Hugging Face directory that holds it. {_NO_PICKLE}")
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", str(path_or_hub_id)):
        raise ModelError(f"{path}: no such directory; give a Hugging Face directory or a hub id such as owner/name")
    import huggingface_hub

    try:
        return Path(
            huggingface_hub.snapshot_download(
                str(path_or_hub_id), revision=revision, allow_patterns=list(_HUB_FILES), ignore_patterns=["*/*"]
            )
        )
    except (OSError, ValueError) as error:  # the hub's own errors derive from OSError
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(
            f"{path_or_hub_id}: no such local directory, and as a hub id it cannot be fetched ({reason})"
        ) from error


def _read_eos_ids(directory: Path, settings: Settings, vocab_size: int) -> tuple[int, ...]:
    """generation_config.json decides, where it says anything: it is what transformers stops on."""
    file = directory / "generation_config.json"
    value = read_json(file).get("eos_token_id") if file.exists() else None
    if value is None:
        file, value = settings.where, settings.values.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise ModelError(f"{file}: eos_token_id={value!r} should be token ids in 0 .. {vocab_size - 1}")
    return tuple(dict.fromkeys(ids))


def _read_params(directory: Path, family: Family, config: ModelConfig, dtype: str) -> Params:
    slots = slots_of(family, config)
    embedding, head = family.tensors["embedding"].name, family.tensors["head.kernel"].name
    with contextlib.ExitStack() as stack:
        stored = _open_tensors(directory, stack)
        wanted = {slot.name for slot in slots}
        # Buffers that old transformers wrote: functions of the config, not weights.
        unexpected = {name for name in stored.keys() - wanted if not name.endswith("rotary_emb.inv_freq")}
        missing = wanted - stored.keys()
        if config.tie_embeddings and head in unexpected and not missing:
            if not np.array_equal(stored[head].get_tensor(head), stored[embedding].get_tensor(embedding)):
                raise ModelError(
                    f"{directory}: {head} differs from {embedding} though config.json ties them; "
                    "set tie_word_embeddings to false to use it, or drop it"
                )
            unexpected.remove(head)
        if missing or unexpected:
            raise ModelError(
                f"{directory}: the tensors do not fit config.json; missing: {_listed(missing)}; "
                f"unexpected: {_listed(unexpected)}"
            )
        params: Params = {}
        for slot in slots:
            node = params
            for part in slot.path[:-1]:
                node = node.setdefault(part, {})
            node[slot.path[-1]] = _read_tensor(stored[slot.name], slot, dtype, directory)
    return params


def _read_tensor(handle: Any, slot: Slot, dtype: str, directory: Path) -> Array:
    header = handle.get_slice(slot.name)
    shape, stored_as = tuple(header.get_shape()), header.get_dtype()
    if shape != slot.stored_shape:
        raise ModelError(
            f"{directory}: tensor {slot.name} has shape {list(shape)}, config.json asks for {list(slot.stored_shape)}"
        )
    if stored_as not in _STORED_FLOATS:
        raise ModelError(
            f"{directory}: tensor {slot.name} is stored as {stored_as}, readable are {', '.join(_STORED_FLOATS)}; "
            "export the model without quantisation"
        )
    value = handle.get_tensor(slot.name)
    # A copy that JAX owns: a borrowed numpy buffer cannot be donated to a training step.
    return jnp.array(_cast(value.T if slot.transpose else value, dtype, slot.name))


def _cast(value: np.ndarray, dtype: str, name: str) -> np.ndarray:
    with np.errstate(over="ignore"):
        cast = np.ascontiguousarray(value.astype(dtype, copy=False))
    if dtype == "float16" and np.isinf(cast).any() and not np.isinf(value).any():
        raise ModelError(f"tensor {name} has values beyond the range of float16; use bfloat16 or float32")
    return cast


def _open_tensors(directory: Path, stack: contextlib.ExitStack) -> dict[str, Any]:
    """Tensor name -> the open file that holds it. Every shard must hold exactly what the index says."""
    index_file = directory / INDEX
    if (directory / WEIGHTS).exists():
        shards, weight_map = [WEIGHTS], None
    elif index_file.exists():
        weight_map = read_json(index_file).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
            raise ModelError(f"{index_file}: has no weight_map from tensor names to shards")
        shards = sorted(set(weight_map.values()))
        for shard in shards:
            if Path(shard).name != shard or "\\" in shard or not shard.endswith(".safetensors"):
                raise ModelError(f"{index_file}: shard {shard!r} is not a .safetensors file of this directory")
    else:
        raise ModelError(f"{directory}: holds no {WEIGHTS}; {_NO_PICKLE}: convert the weights to safetensors")
    stored = {}
    for shard in shards:
        handle = stack.enter_context(_open_safetensors(directory / shard))
        for name in handle.keys():  # noqa: SIM118 (a handle is not a dict)
            if weight_map is not None and weight_map.get(name) != shard:
                raise ModelError(f"{directory / shard}: holds {name}, which {INDEX} places in {weight_map.get(name)}")
            stored[name] = handle
    absent = set(weight_map or ()) - stored.keys()
    if absent:
        raise ModelError(f"{index_file}: names tensors that its shards do not hold: {_listed(absent)}")
    return stored


def _open_safetensors(file: Path) -> Any:
    try:
        return safetensors.safe_open(file, framework="np")
    except FileNotFoundError:
        raise ModelError(f"{file}: missing, though {INDEX} names it; fetch it again") from None
    except (OSError, safetensors.SafetensorError) as error:
        raise ModelError(f"{file}: truncated or not a safetensors file ({error}); fetch or save it again") from None


def _listed(names: Collection[str]) -> str:
    shown = sorted(names)[:4]
    return ", ".join(shown) + (f" and {len(names) - 4} more" if len(names) > 4 else "") if names else "none"


def _read_tokenizer(directory: Path) -> Any:
    if not any((directory / file).exists() for file in _TOKENIZER_DATA):
        return None
    auto_tokenizer = import_transformers().AutoTokenizer
    try:
        tokenizer = auto_tokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises plain Exception
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"{directory}: the tokenizer files cannot be read ({reason})") from error
    for key in ("is_local", "local_files_only"):  # how it was loaded; saved again, it would bind the next reader
        tokenizer.init_kwargs.pop(key, None)
    return tokenizer


def import_transformers() -> Any:
    """transformers, imported late because that takes seconds, and without its notice that torch is not installed."""

    def keep(record: logging.LogRecord) -> bool:
        return "PyTorch was not found" not in record.getMessage()

    logger = logging.getLogger("transformers")
    logger.addFilter(keep)
    try:
        import transformers
    finally:
        logger.removeFilter(keep)
    return transformers


# --- writing --------------------------------------------------------------------------------------------------------


def save_model(
    model: LoadedModel,
    directory: str | os.PathLike,
    *,
    dtype: str | None = None,
    overwrite: bool = False,
    card: str | None = None,
) -> None:
    """Write a Hugging Face directory that `load_model`, transformers and vLLM read, with a ``SHA256SUMS`` manifest.

    ``dtype``: of the stored weights (default: the model's own). ``card``: the README.md. The directory appears
    complete or not at all; with ``overwrite`` the old one is kept until the new one is in place. Raises `ModelError`
    if it exists and ``overwrite`` is not set, or if what is there is not a model directory.
    """
    dtype = dtype or str(model.dtype)
    if dtype not in DTYPES:
        raise ModelError(f"dtype={dtype!r} is unknown; use one of {', '.join(DTYPES)}")
    final = Path(directory).expanduser().resolve()
    _check_replaceable(final, overwrite)
    token = secrets.token_hex(4)
    partial, old = (final.with_name(f".{final.name}.{kind}-{token}") for kind in ("partial", "old"))
    try:
        partial.mkdir(parents=True)
        _write_files(model, partial, dtype, card)
        try:
            if final.exists():
                final.rename(old)
            partial.rename(final)
        except BaseException:  # an interrupt as well: the old directory goes back where it was
            if old.exists() and not final.exists():
                old.rename(final)
            raise
    except OSError as error:
        raise ModelError(f"{final}: cannot be written ({error})") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def _check_replaceable(final: Path, overwrite: bool) -> None:
    if not final.exists():
        return
    if not overwrite:
        raise ModelError(f"{final}: exists already; choose another directory, or pass overwrite=True to replace it")
    entries = list(final.iterdir()) if final.is_dir() else None
    if entries is None or any(not e.is_file() for e in entries) or (entries and not (final / "config.json").exists()):
        raise ModelError(f"{final}: is not a plain model directory, so it is not replaced; remove it yourself first")


def _write_files(model: LoadedModel, directory: Path, dtype: str, card: str | None) -> None:
    family, config, tokenizer = LLAMA, model.config, model.tokenizer
    tensors = {}
    for slot in slots_of(family, config):
        value = np.asarray(_leaf(model.params, slot))
        tensors[slot.name] = _cast(value.T if slot.transpose else value, dtype, slot.name)
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    special = {
        # Written even when null: an absent id means Llama's default there, not none.
        "bos_token_id": getattr(tokenizer, "bos_token_id", None),
        "eos_token_id": model.eos_ids[0] if len(model.eos_ids) == 1 else list(model.eos_ids) or None,
    }
    settings = {"architectures": [family.architecture], "model_type": family.model_type, "dtype": dtype}
    settings |= {"torch_dtype": dtype, **family.write_config(config), **special}
    write_json(directory / "config.json", settings)
    pad = {"pad_token_id": getattr(tokenizer, "pad_token_id", None)}
    write_json(directory / "generation_config.json", {k: v for k, v in (special | pad).items() if v is not None})
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)
        _rename_tokenizer_class(directory / "tokenizer_config.json")
    (directory / CARD).write_text(card if card is not None else _default_card(model), encoding="utf-8")
    write_manifest(directory)


def _leaf(params: Params, slot: Slot) -> Any:
    node = params
    for part in slot.path:
        node = node.get(part) if isinstance(node, Mapping) else None
    found = getattr(node, "shape", None)
    if found != slot.shape:
        path = ".".join(map(str, slot.path))
        raise ModelError(f"parameter {path} should have shape {list(slot.shape)}, found {found and list(found)}")
    return node


def _rename_tokenizer_class(file: Path) -> None:
    """Name the tokenizer class as transformers 4 knows it; transformers 5 reads both names."""
    if file.exists():
        settings = read_json(file)
        if settings.get("tokenizer_class") == "TokenizersBackend":
            write_json(file, {**settings, "tokenizer_class": "PreTrainedTokenizerFast"})


def _default_card(model: LoadedModel) -> str:
    config = model.config
    count = sum(leaf.size for leaf in jax.tree.leaves(model.params))
    return (
        f"---\nlibrary_name: transformers\npipeline_tag: text-generation\n---\n\n# {model.name}\n\n"
        f"A Llama decoder of {count:,} parameters: {config.num_layers} layers, hidden size {config.hidden_size}, "
        f"{config.num_heads} heads ({config.num_kv_heads} key-value), vocabulary {config.vocab_size}, "
        f"{config.max_positions} positions. Written by specjax; check the files with `sha256sum -c {MANIFEST}`.\n"
    )


# --- pairing --------------------------------------------------------------------------------------------------------


def check_same_vocabulary(target: LoadedModel, draft: LoadedModel) -> None:
    """Raises `ModelError` unless a token id means the same in both models: equal sizes and, where both have a
    tokenizer, equal vocabularies by content.
    """
    remedy = "use a draft of the same vocabulary, or distill one for this target with train_draft.py"
    ours, theirs = target.config.vocab_size, draft.config.vocab_size
    if ours != theirs:
        raise ModelError(f"the draft's vocabulary has {theirs} tokens, the target's {ours}; {remedy}")
    if target.tokenizer is None or draft.tokenizer is None or target.tokenizer is draft.tokenizer:
        return
    tables = [{id_: token for token, id_ in m.tokenizer.get_vocab().items()} for m in (target, draft)]
    differing = [id_ for id_ in sorted(tables[0].keys() | tables[1].keys()) if tables[0].get(id_) != tables[1].get(id_)]
    if differing:
        shown = ", ".join(f"{id_}: {tables[0].get(id_)!r} and {tables[1].get(id_)!r}" for id_ in differing[:3])
        raise ModelError(
            f"the tokenizers of target and draft differ in {len(differing)} ids (target and draft: {shown}); {remedy}"
        )
