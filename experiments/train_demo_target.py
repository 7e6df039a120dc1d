"""Train the demo's target from scratch: Python source -> byte-level BPE -> Llama-shaped decoder -> HF directory.

    python experiments/train_demo_target.py --out models/demo-target        # about 100 minutes on 2 CPU cores

Resumable: run the same command again after an interruption. The model starts with half of its layers and is stacked
once (2 -> 4; 1911.04805 and others), which saves a quarter of the computation; the learning rate is constant after a
warm-up and decays linearly over the last part; the length grows 256 -> 512 -> 1,024, so late positions are trained.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

# Large activations come from fresh pages at every step; huge pages and no trimming save a quarter of the time on CPU.
_MALLOC = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=4000000000:glibc.malloc.trim_threshold=100000000000"
if __name__ == "__main__" and sys.platform == "linux" and "GLIBC_TUNABLES" not in os.environ:
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "GLIBC_TUNABLES": _MALLOC})

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from specjax.distill import corpus
from specjax.models.config import ModelConfig
from specjax.models.transformer import Model

VOCAB, HELD_OUT, SEED = 2048, 0.05, 0
TOKENS_A_STEP, MICRO_TOKENS = 4096, 512
FINAL = ModelConfig(
    vocab_size=VOCAB,
    hidden_size=512,
    intermediate_size=1280,
    num_layers=4,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    max_positions=1024,
)
PEAK_LR, WARMUP = 2e-3, 100


def train_tokenizer(documents, directory: Path) -> PreTrainedTokenizerFast:
    """Byte-level BPE with one special token, which closes documents and pads."""
    eos = "<|endoftext|>"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=[eos], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((d.text for d in sorted(documents, key=lambda d: d.digest)), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, bos_token=eos, pad_token=eos)
    fast.save_pretrained(directory)
    return fast


def stack(params, times: int):
    """Repeat the layers in order: layer i of the deep model starts as layer i % L of the shallow one."""
    shallow = params["layers"]
    count = len(shallow)
    return {**params, "layers": {i: shallow[i % count] for i in range(times * count)}}


def make_step(model: Model, optimizer, length: int):
    def loss_of(params, tokens):
        positions = jnp.broadcast_to(jnp.arange(length), (tokens.shape[0], length))
        logits = model(params, tokens[:, :-1], positions).logits
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    @jax.jit
    def evaluate(params, tokens):
        return loss_of(params, tokens)

    def step(params, opt_state, tokens):
        # Microbatches whose activations stay in cache: 1.35x over one pass on 2 cores, the same gradient.
        micro = tokens.reshape(-1, max(1, MICRO_TOKENS // length), length + 1)

        def accumulate(total, tokens):
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss_of)(params, tokens)), None

        zeros = (jnp.float32(0), jax.tree.map(jnp.zeros_like, params))
        total, _ = jax.lax.scan(accumulate, zeros, micro)
        loss, grads = jax.tree.map(lambda x: x / len(micro), total)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return jax.jit(step, donate_argnums=(0, 1)), evaluate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("models/demo-target"))
    parser.add_argument("--work", type=Path, default=Path("runs/demo-target"), help="checkpoints and log")
    parser.add_argument("--tokens", type=float, default=8.2e6)
    parser.add_argument("--shallow-share", type=float, default=0.55, help="share of the tokens before stacking")
    parser.add_argument("--decay-share", type=float, default=0.25, help="share of the tokens with a falling rate")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)

    documents = corpus.read_documents(corpus.STDLIB)
    train, held_out = corpus.split_held_out(documents, HELD_OUT)
    tokenizer_dir = args.work / "tokenizer"
    if tokenizer_dir.exists():
        tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_dir)
    else:
        tokenizer = train_tokenizer(train, tokenizer_dir)
    stream = corpus.tokenize(tokenizer, train, tokenizer.eos_token_id)
    held_out_stream = corpus.tokenize(tokenizer, held_out, tokenizer.eos_token_id)

    total = int(args.tokens) // TOKENS_A_STEP
    stack_at = int(total * args.shallow_share)
    decay = int(total * args.decay_share)
    schedule = optax.join_schedules(
        [
            optax.linear_schedule(0.0, PEAK_LR, WARMUP),
            optax.constant_schedule(PEAK_LR),
            optax.linear_schedule(PEAK_LR, 0.02 * PEAK_LR, decay),
        ],
        [WARMUP, total - decay],
    )
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(
            schedule, b1=0.9, b2=0.95, weight_decay=0.1, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)
        ),
    )
    shallow = Model(dataclasses.replace(FINAL, num_layers=FINAL.num_layers // 2))
    deep = Model(FINAL)

    def length_at(step: int) -> int:
        return 256 if step < 0.75 * total else 512 if step < 0.92 * total else 1024

    print(f"{len(train)} files, {len(stream):,} train tokens, {len(held_out_stream):,} held out; {total} steps", flush=True)
    log_path = args.work / "log.jsonl"
    data = {
        length: corpus.batches(corpus.windows(stream, length), TOKENS_A_STEP // length, seed=SEED + length)
        for length in (256, 512, 1024)
    }
    evaluation = corpus.windows(held_out_stream, 512)[:64]

    params = shallow.init(jax.random.key(SEED))
    state = {"params": params, "opt": optimizer.init(params)}
    with ocp.CheckpointManager(
        (args.work / "checkpoints").absolute(), options=ocp.CheckpointManagerOptions(max_to_keep=2)
    ) as manager:
        start = manager.latest_step() or 0
        if start:
            if start > stack_at:
                params = jax.eval_shape(lambda: deep.init(jax.random.key(SEED)))
                state = {"params": params, "opt": jax.eval_shape(optimizer.init, params)}
            state = manager.restore(start, args=ocp.args.StandardRestore(jax.tree.map(_abstract, state)))
        functions = {}
        began, last = time.time(), start
        for step in range(start, total):
            if step == stack_at:
                params, opt = stack(state["params"], 2), state["opt"]
                # The moments are stacked like the weights, so the optimizer does not start over.
                opt = jax.tree.map(
                    lambda x: stack(x, 2) if isinstance(x, dict) and "layers" in x else x,
                    opt,
                    is_leaf=lambda x: isinstance(x, dict) and "layers" in x,
                )
                state = jax.tree.map(jnp.array, {"params": params, "opt": opt})
            model = shallow if step < stack_at else deep
            length = length_at(step)
            if (model, length) not in functions:
                functions = {(model, length): make_step(model, optimizer, length)}
            update, _ = functions[model, length]
            tokens = data[length][step]
            state["params"], state["opt"], loss = update(state["params"], state["opt"], tokens)
            if (step + 1) % 20 == 0 or step + 1 == total:
                loss = float(loss)
                if not np.isfinite(loss):
                    raise SystemExit(f"step {step + 1}: loss {loss}; the last checkpoint is kept")
                rate = (step + 1 - last) * TOKENS_A_STEP / (time.time() - began)
                began, last = time.time(), step + 1
                record = {"step": step + 1, "tokens": (step + 1) * TOKENS_A_STEP, "loss": loss, "tokens_per_s": rate}
                if (step + 1) % 200 == 0 or step + 1 == total:
                    _, evaluate = make_step(model, optimizer, 512)
                    record["held_out_nll"] = float(
                        np.mean([evaluate(state["params"], evaluation[i : i + 8]) for i in range(0, len(evaluation), 8)])
                    )
                print(json.dumps(record), flush=True)
                with log_path.open("a") as log:
                    log.write(json.dumps(record) + "\n")
            if (step + 1) % 100 == 0 or step + 1 == total:
                manager.save(step + 1, args=ocp.args.StandardSave(state))


def _abstract(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


if __name__ == "__main__":
    main()
