"""Other libraries' decoding of the same weights, in the form that `questions.py` asks. transformers on torch: plain,
with prompt lookup, and assisted by a separate draft (`make parity-setup` installs torch). llama.cpp: plain and with
prompt lookup, from GGUF files that `requantise.py` writes (`pip install llama-cpp-python` compiles it; where it stops
with an illegal instruction, with `CMAKE_ARGS=-DGGML_NATIVE=OFF` and the instructions wanted, as GGML_AVX512=ON)."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from specjax.errors import DataError
from specjax.models.files import import_transformers

REST = 0.3
"""Seconds to leave before a timed run beside another library, whose threads spin for a while after their last work."""
LOOKUP_TOKENS = 10
"""Number of tokens that prompt lookup proposes, both libraries' own example."""
_CORES = len(os.sched_getaffinity(0))
_CONTEXT = 4_096
"""Tokens of a prompt and its answer that llama.cpp has room for."""


@dataclasses.dataclass(frozen=True)
class Found:
    """New tokens of each prompt. ``stats``: None, for no library tells how many passes it took."""

    tokens: list[list[int]]
    stats: tuple[None, ...] = (None,)


@dataclasses.dataclass(frozen=True)
class Transformers:
    """``options``: those of `generate` beside sampling and the number of tokens."""

    torch: Any
    library: Any
    model: Any
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def generate(
        self, prompts: Sequence[Sequence[int]], *, seed: int, max_new_tokens: int, temperature: float
    ) -> Found:
        """The new tokens of the one prompt, up to the model's end of a turn."""
        (prompt,) = prompts
        # Its own default would be the 50 most likely tokens.
        sampling = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
        settings = self.library.GenerationConfig(
            max_new_tokens=max_new_tokens,
            do_sample=temperature > 0,
            eos_token_id=self.model.generation_config.eos_token_id,
            pad_token_id=0,
            **sampling,
        )
        self.torch.manual_seed(seed)
        ids = self.torch.tensor([list(prompt)])
        given = {"attention_mask": self.torch.ones_like(ids), "generation_config": settings, **self.options}
        with self.torch.inference_mode():
            out = self.model.generate(ids, **given)
        return Found([out[0, len(prompt) :].tolist()])


def transformers_of(target: Path, draft: Path | None, dtypes: Sequence[str]) -> Iterator[tuple[str, Transformers]]:
    """(name, decoder) of each way to decode, in each dtype. ``draft``: directory of a separate draft, None: not
    assisted. Raises `DataError` without torch."""
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise DataError("torch is not installed, and transformers decodes on it; run `make parity-setup`") from error
    torch.set_num_threads(_CORES)
    library = import_transformers()
    library.utils.logging.set_verbosity_error()
    library.utils.logging.disable_progress_bar()

    @functools.cache
    def loaded(directory: Path, dtype: str) -> Any:
        of = getattr(torch, dtype)
        return library.AutoModelForCausalLM.from_pretrained(directory, dtype=of, local_files_only=True).eval()

    for dtype in dtypes:
        model = functools.partial(Transformers, torch, library, loaded(target, dtype))
        yield f"transformers {dtype}", model()
        yield f"transformers {dtype}, prompt lookup", model({"prompt_lookup_num_tokens": LOOKUP_TOKENS})
        if draft is not None:
            yield f"transformers {dtype}, assisted", model({"assistant_model": loaded(draft, dtype)})


@dataclasses.dataclass(frozen=True)
class LlamaCpp:
    model: Any
    ends: frozenset[int]
    """Tokens that end a turn."""

    def generate(
        self, prompts: Sequence[Sequence[int]], *, seed: int, max_new_tokens: int, temperature: float
    ) -> Found:
        """The new tokens of the one prompt, up to the model's end of a turn."""
        (prompt,) = prompts
        self.model.reset()  # otherwise the prompt of the last answer is not read again
        self.model.set_seed(seed)
        sampling = {"temp": temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0}
        tokens: list[int] = []
        for token in self.model.generate(list(prompt), **sampling):
            tokens.append(token)
            if len(tokens) == max_new_tokens or token in self.ends:
                break
        return Found([tokens])


def llama_cpp_of(files: Sequence[Path], ends: Iterable[int]) -> Iterator[tuple[str, LlamaCpp]]:
    """(name, decoder) of each way to decode, from each file. ``ends``: ids of the tokens that end a turn. Raises
    `DataError` without the library."""
    try:
        library = importlib.import_module("llama_cpp")
        lookup = importlib.import_module("llama_cpp.llama_speculative").LlamaPromptLookupDecoding
    except ImportError as error:
        raise DataError("llama.cpp is not installed; run pip install llama-cpp-python, which compiles it") from error
    settings = {"n_ctx": _CONTEXT, "n_threads": _CORES, "n_threads_batch": _CORES, "verbose": False}
    for file in files:
        for way, draft in (("", None), (", prompt lookup", lookup(num_pred_tokens=LOOKUP_TOKENS))):
            # With a draft the library keeps logits of every token, but makes room for them only if it is told to.
            room = {"logits_all": draft is not None}
            model = library.Llama(model_path=str(file), draft_model=draft, **room, **settings)
            yield f"llama.cpp {file.stem}{way}", LlamaCpp(model, frozenset(ends))
