"""Train the demo's target from scratch: Python source -> byte-level BPE -> Llama-shaped decoder -> HF directory.

    python experiments/train_demo_target.py --out models/demo-target        # about 150 minutes on 2 quiet CPU cores

Resumable: run the same command again after an interruption. The model grows twice while it learns, which costs half of
what its final shape would from the start: it begins with half of its layers and is stacked (1904.10631's idea, applied
once); later its MLPs become 2.6 times as wide without changing what it computes (1511.05641). The learning rate rises
and falls once for each width; the length grows 256 -> 512 -> 1,024, so late positions are trained.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

from specjax.data import corpus, rows
from specjax.data.tokenizer import train_tokenizer
from specjax.models.config import ModelConfig
from specjax.models.files import import_transformers
from specjax.models.hf import LoadedModel, save_model
from specjax.models.transformer import Model

VOCAB, HELD_OUT, SEED = 2048, 0.05, 0
TOKENS_A_STEP, MICRO_TOKENS = 4096, 512
FINAL = ModelConfig(
    vocab_size=VOCAB,
    hidden_size=512,
    intermediate_size=3328,
    num_layers=4,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    max_positions=1024,
)
NARROW = dataclasses.replace(FINAL, intermediate_size=1280)
SHALLOW = dataclasses.replace(NARROW, num_layers=2)
# What changes at which step of the full run.
STEPS = 2500
SHAPES = {0: SHALLOW, 1100: NARROW, 2001: FINAL}
RATES = {0: 0.0, 100: 2e-3, 1500: 2e-3, 2000: 4e-5, 2050: 1e-3, 2200: 1e-3, STEPS: 2e-5}
"""The learning rate at these steps, linear in between."""
LENGTHS = {0: 256, 1501: 512, 1841: 1024, 2001: 512, 2400: 1024}
WEIGHT_DECAY = 0.1
CURVE_POSITIONS = 64 * 512
# Large activations come from fresh pages at every step; huge pages and no trimming save a quarter of the time on CPU.
MALLOC = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=4000000000:glibc.malloc.trim_threshold=100000000000"


def grow(state, old: ModelConfig, new: ModelConfig, key):
    """``state`` of shape ``old`` as one of shape ``new``. The moments grow like the weights, so the optimizer does not
    start over."""

    def is_params(x):
        return isinstance(x, dict) and "layers" in x

    def grown(x, of_weights: bool):
        return widen(stack(x, new.num_layers // old.num_layers), old, new, key if of_weights else None)

    # No two layers share a buffer afterwards, or it could not be donated.
    copies = functools.partial(jax.tree.map, jnp.array)
    opt = jax.tree.map(lambda x: grown(x, False) if is_params(x) else x, state["opt"], is_leaf=is_params)
    return copies({"params": grown(state["params"], True), "opt": opt})


def stack(params, times: int):
    """Repeat the layers in order: layer i of the deep model starts as layer i % L of the shallow one."""
    layers = params["layers"]
    return {**params, "layers": {i: layers[i % len(layers)] for i in range(times * len(layers))}}


def widen(params, old: ModelConfig, new: ModelConfig, key):
    """Add neurons that read at random and are not read yet, so the function stays; without a key, zeros (moments)."""
    added = new.intermediate_size - old.intermediate_size
    if not added:
        return params

    def wider(index, name, kernel):
        shape = (added, kernel.shape[1]) if name == "down_proj" else (kernel.shape[0], added)
        if key is None or name == "down_proj":
            more = jnp.zeros(shape, kernel.dtype)
        else:
            more = jax.random.normal(jax.random.fold_in(key, 2 * index + (name == "up_proj")), shape, kernel.dtype)
            more = more * len(kernel) ** -0.5
        return {"kernel": jnp.concatenate([kernel, more], axis=0 if name == "down_proj" else 1)}

    layers = {
        index: {**layer, "mlp": {name: wider(index, name, linear["kernel"]) for name, linear in layer["mlp"].items()}}
        for index, layer in params["layers"].items()
    }
    return {**params, "layers": layers}


def loss_of(model: Model, params, tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1] - 1), (len(tokens), tokens.shape[1] - 1))
    logits = model(params, tokens[:, :-1], positions).logits
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def make_update(model: Model, optimizer, length: int):
    def update(state, tokens):
        # Microbatches whose activations stay in cache: 1.35x over one pass on 2 cores, the same gradient.
        micro = tokens.reshape(-1, max(1, MICRO_TOKENS // length), length + 1)

        def accumulate(total, tokens):
            found = jax.value_and_grad(lambda p: loss_of(model, p, tokens))(state["params"])
            return jax.tree.map(jnp.add, total, found), None

        zeros = (jnp.float32(0), jax.tree.map(jnp.zeros_like, state["params"]))
        total, _ = jax.lax.scan(accumulate, zeros, micro)
        loss, grads = jax.tree.map(lambda x: x / len(micro), total)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    return jax.jit(update, donate_argnums=0)


def make_optimizer(total: int) -> optax.GradientTransformation:
    at, rates = jnp.array([step * total // STEPS for step in RATES], jnp.float32), jnp.array(list(RATES.values()))

    def schedule(step):
        return jnp.interp(jnp.asarray(step, jnp.float32), at, rates)

    def decayed(params):
        return jax.tree.map(lambda x: x.ndim > 1, params)

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=WEIGHT_DECAY, mask=decayed),
    )


def held_out_loss(model: Model, params, stream: np.ndarray, positions: int | None = None) -> tuple[float, int]:
    """(nats a token, positions), over the first ``positions`` of the held-out text, or all of it."""
    windows = windows_of(stream, 512)[: None if positions is None else positions // 512]
    windows = windows[: len(windows) - len(windows) % 8]
    losses = [_held_out_loss(model, params, windows[i : i + 8]) for i in range(0, len(windows), 8)]
    return float(np.mean(losses)), windows.shape[0] * 512


def windows_of(stream: np.ndarray, length: int) -> np.ndarray:
    """``[N, length + 1]``, overlapping by one token; attention runs across documents."""
    return np.lib.stride_tricks.sliding_window_view(stream, length + 1)[::length]


def batches(windows: np.ndarray, batch_size: int, seed: int) -> grain.MapDataset:
    return grain.MapDataset.source(cast(Sequence[np.ndarray], windows)).seed(seed).shuffle().repeat().batch(batch_size)


_held_out_loss = jax.jit(loss_of, static_argnums=0)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("models/demo-target"))
    parser.add_argument("--work", type=Path, default=Path("runs/demo-target"), help="checkpoints and log")
    parser.add_argument("--steps", type=int, default=STEPS, help="fewer: everything happens proportionally earlier")
    args = parser.parse_args(argv)
    args.work.mkdir(parents=True, exist_ok=True)

    train, held_out = corpus.split_held_out(corpus.read_documents(corpus.STDLIB), HELD_OUT)
    tokenizer_dir = args.work / "tokenizer"
    if tokenizer_dir.exists():
        tokenizer = import_transformers().PreTrainedTokenizerFast.from_pretrained(tokenizer_dir)
    else:
        tokenizer = train_tokenizer(train, VOCAB, tokenizer_dir)
    stream, held_out_stream = (rows.pack(tokenizer, d, tokenizer.eos_token_id, 512).stream for d in (train, held_out))
    total = args.steps
    print(f"{len(train)} files, {len(stream):,} tokens, {len(held_out_stream):,} held out; {total} steps", flush=True)

    params = train_target(total, args.work, stream, held_out_stream)
    loss, positions = held_out_loss(Model(FINAL), params, held_out_stream)
    model = LoadedModel(Model(FINAL), params, tokenizer, (tokenizer.eos_token_id,), "demo-target")
    log = read_log(args.work / "log.jsonl")
    card = model_card(model, total, loss, positions, train, held_out, log)
    save_model(model, args.out, dtype="bfloat16", overwrite=True, card=card)
    print(f"held-out loss {loss:.4f} nats a token over {positions:,} positions; written to {args.out}")


def train_target(total: int, work: Path, stream: np.ndarray, held_out_stream: np.ndarray):
    """The final parameters; goes on from the last checkpoint in ``work``."""
    optimizer = make_optimizer(total)
    data = {
        length: batches(windows_of(stream, length), TOKENS_A_STEP // length, seed=SEED + length)
        for length in set(LENGTHS.values())
    }

    def current(table: dict, step: int):
        """The table's entry for the update that follows ``step`` updates."""
        return [value for since, value in table.items() if since * total // STEPS <= step][-1]

    def fresh(config):
        params = Model(config).init(jax.random.key(SEED))
        return {"params": params, "opt": optimizer.init(params)}

    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager((work / "checkpoints").absolute(), options=options) as manager:
        start = manager.latest_step() or 0
        # What was saved has the shape of the update before.
        shape = current(SHAPES, max(0, start - 1))
        if start:
            state = manager.restore(start, args=ocp.args.StandardRestore(jax.eval_shape(lambda: fresh(shape))))
        else:
            state = fresh(shape)
        began, last, update, update_for = time.time(), start, None, None
        for step in range(start, total):
            new = current(SHAPES, step)
            if new != shape:
                state, shape = grow(state, shape, new, jax.random.key(SEED + step)), new
            model, length = Model(shape), current(LENGTHS, step)
            if update_for != (model, length):
                update, update_for = make_update(model, optimizer, length), (model, length)
            assert update is not None
            state, loss = update(state, data[length][step])
            done = step + 1
            if done % 20 == 0 or done == total:
                loss = float(loss)
                if not np.isfinite(loss):
                    raise SystemExit(f"error: step {done}: the loss is {loss}; the last checkpoint is kept")
                rate = (done - last) * TOKENS_A_STEP / (time.time() - began)
                record = {"step": done, "tokens": done * TOKENS_A_STEP, "loss": loss, "tokens_per_s": rate}
                if done % 200 == 0 or done == total:
                    record["held_out_nll"], _ = held_out_loss(model, state["params"], held_out_stream, CURVE_POSITIONS)
                began, last = time.time(), done
                print(json.dumps(record), flush=True)
                with (work / "log.jsonl").open("a") as log:
                    log.write(json.dumps(record) + "\n")
            if done % 100 == 0 or done == total:
                manager.save(done, args=ocp.args.StandardSave(state))
        return state["params"]


def read_log(file: Path) -> list[dict]:
    """One record a step: after an interruption some steps were run twice, the later one counts."""
    return list({record["step"]: record for record in map(json.loads, file.read_text().splitlines())}.values())


def model_card(model: LoadedModel, total: int, loss: float, positions: int, train, held_out, log) -> str:
    parameters = sum(x.size for x in jax.tree.leaves(model.params))
    version = ".".join(map(str, sys.version_info[:3]))

    def at(step: int) -> int:
        return step * total // STEPS

    rows = {
        "held-out loss": f"{loss:.4f} nats a token over {positions:,} positions (files chosen by their hash, float32)",
        "trained on": f"{total * TOKENS_A_STEP:,} tokens: {total:,} steps of {TOKENS_A_STEP:,}",
        "text": f"the source files of CPython {version}'s standard library without its tests, `encodings` and "
        f"`pydoc_data`: {len(train)} files for training, {len(held_out)} held out",
        "SHA-256 of the text": corpus.corpus_digest([*train, *held_out]),
        "licence of the text": "Python Software Foundation License 2.0; some files carry their own permissive notice",
        "shape": f"{FINAL.num_layers} layers, hidden {FINAL.hidden_size}, SwiGLU {FINAL.intermediate_size}, "
        f"{FINAL.num_heads} query and {FINAL.num_kv_heads} key-value heads of {FINAL.head_dim}, tied embeddings, "
        f"{FINAL.max_positions:,} positions, byte-level BPE of {FINAL.vocab_size:,}",
        "optimizer": f"AdamW in float32, weight decay {WEIGHT_DECAY:g}, betas 0.9 and 0.95, gradient norm clipped at 1",
        "learning rate": "linear between " + ", ".join(f"{rate:g} (step {at(step):,})" for step, rate in RATES.items()),
        "growth": ", ".join(
            f"{c.num_layers} layers with SwiGLU {c.intermediate_size:,} from step {at(step):,}"
            for step, c in SHAPES.items()
        ),
        "sequences": ", ".join(f"{length:,} tokens from step {at(step):,}" for step, length in LENGTHS.items()),
        "machine": f"{os.cpu_count()} cores, {jax.default_backend()}, JAX {jax.__version__}",
        "made by": "`python experiments/train_demo_target.py`",
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    curve = "\n".join(
        f"| {r['step']:,} | {r['tokens']:,} | {r['loss']:.3f} | {r['held_out_nll']:.3f} |"
        for r in log
        if "held_out_nll" in r
    )
    return (
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\nlicense: psfl\n---\n\n# demo-target\n\n"
        f"A Llama-shaped decoder of {parameters:,} parameters for Python source, trained from scratch: the target of "
        "specjax's demo, small enough to ship. It completes code in the manner of the standard library and is no "
        f"assistant.\n\n| | |\n|---|---|\n{table}\n\n## Curve\n\nThe held-out loss is over the first "
        f"{CURVE_POSITIONS:,} held-out positions, the training loss that of one batch.\n\n"
        f"| step | tokens | training loss | held-out loss |\n|---|---|---|---|\n{curve}\n"
    )


if __name__ == "__main__":
    if sys.platform == "linux" and "GLIBC_TUNABLES" not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "GLIBC_TUNABLES": MALLOC})
    main()
