"""Kernels of libraries against plain attention: splash in interpret mode, cuDNN's call with XLA in cuDNN's place."""

from __future__ import annotations

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import backend
from specjax.models import products
from specjax.models.attention import flash
from specjax.models.attention.flash import Call
from specjax.models.attention.sight import AttentionMask, Tree

ROWS, LENGTH, HEADS, KV_HEADS, FEATURES = 2, 128, 4, 2, 64
SEGMENTS = jnp.asarray(np.sort(np.random.default_rng(0).integers(0, 3, (ROWS, LENGTH)), axis=1), jnp.int32)


def arrays():
    keys = jax.random.split(jax.random.key(0), 3)
    heads = (HEADS, KV_HEADS, KV_HEADS)
    return tuple(
        jax.random.normal(k, (ROWS, LENGTH, n, FEATURES), "bfloat16") for k, n in zip(keys, heads, strict=True)
    )


def plain(q, k, v, segments, window, call: Call):
    at = jnp.broadcast_to(jnp.arange(LENGTH, dtype=jnp.int32)[None], (ROWS, LENGTH))
    sight = AttentionMask(at[:1], segments=None if segments is None else (segments, segments)).within(window, at, at)
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    k = k.transpose(0, 2, 1, 3).reshape(-1, LENGTH, FEATURES)
    v = v.transpose(0, 2, 3, 1).reshape(-1, FEATURES, LENGTH)
    return products.attend(q, k, v, sight.all(LENGTH), call.scale, call.soft_cap)


SPLASH = functools.partial(flash.splash, interpret=True)
CUDNN = functools.partial(flash.cudnn, implementation="xla")


@pytest.mark.parametrize(
    ("kernel", "segments", "window", "call"),
    [
        pytest.param(SPLASH, None, None, Call(0.2), id="splash"),
        pytest.param(SPLASH, SEGMENTS, 40, Call(0.2, 5.0), id="splash-documents-window-cap"),
        pytest.param(CUDNN, None, None, Call(0.2), id="cudnn"),
        pytest.param(CUDNN, None, 40, Call(0.2), id="cudnn-window"),
        pytest.param(CUDNN, SEGMENTS, None, Call(0.2), id="cudnn-documents"),
    ],
)
def test_a_kernel_reads_what_plain_attention_does(kernel, segments, window, call):
    """And its gradient is the same, up to what bfloat16 holds."""
    q, k, v = arrays()
    towards = jax.random.normal(jax.random.key(1), q.shape)

    def read(how, q, k, v):
        out = how(q, k, v, segments, window, call).astype(jnp.float32)
        return jnp.sum(out * towards), out

    with jax.numpy_dtype_promotion("standard"):  # as XLA's stand-in for cuDNN needs it
        (found, of_found), (expected, of_expected) = (
            jax.value_and_grad(functools.partial(read, how), (0, 1, 2), has_aux=True)(q, k, v)
            for how in (kernel, plain)
        )
    np.testing.assert_allclose(found[1], expected[1], atol=0.03)
    for a, b in zip(of_found, of_expected, strict=True):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        assert np.abs(a - b).max() < 0.03 * np.abs(b).max()


def test_what_a_kernel_cannot_do_is_done_without_it_and_said_once(monkeypatch, caplog):
    q, k, v = arrays()
    at = jnp.arange(LENGTH, dtype=jnp.int32)[None]
    flash._told.cache_clear()
    whole_rows = functools.partial(flash.whole_rows, q, k, v)
    with caplog.at_level(logging.WARNING):
        monkeypatch.setattr(backend, "flash_kernel", lambda: "cudnn")
        monkeypatch.setattr(flash, "LARGEST_MASK", 100)
        assert whole_rows(AttentionMask(at, segments=(SEGMENTS, SEGMENTS)), Call(0.2)) is None
        assert whole_rows(AttentionMask(at), Call(0.2, soft_cap=3.0)) is None
        assert whole_rows(AttentionMask(at), Call(0.2, soft_cap=3.0)) is None
        mask = jnp.ones((ROWS, LENGTH, LENGTH), bool)
        assert whole_rows(AttentionMask(at, Tree(jnp.zeros(ROWS, jnp.int32), mask)), Call(0.2)) is None
        assert whole_rows(AttentionMask(at), Call(0.2)) is None  # no cuDNN here
        monkeypatch.setattr(backend, "flash_kernel", lambda: "splash")
        of_float32 = [x.astype(jnp.float32) for x in (q, k, v)]
        assert flash.whole_rows(*of_float32, sight=AttentionMask(at), call=Call(0.2)) is None
        too_short = [x[:, :127] for x in (q, k, v)]
        assert flash.whole_rows(*too_short, sight=AttentionMask(at), call=Call(0.2)) is None
    told = [record.message for record in caplog.records]
    reasons = ("several documents", "capped scores", "a mask of its own", "cuDNN is not detected", "float32")
    assert len(told) == len(reasons)
    assert all(reason in message for reason, message in zip(reasons, told, strict=True))


def test_without_an_accelerator_there_is_no_kernel():
    at = jnp.arange(LENGTH, dtype=jnp.int32)[None]
    assert backend.flash_kernel() is None
    q, k, v = arrays()
    assert flash.whole_rows(q, k, v, AttentionMask(at), Call(0.2)) is None


@pytest.mark.parametrize("features", [64, 128])
def test_splash_lowers_for_a_tpu_from_here(features):
    shape = jax.ShapeDtypeStruct((1, 256, 4, features), jnp.bfloat16)

    def loss(q, k, v):
        return jnp.sum(flash.splash(q, k, v, None, None, Call(0.2)).astype(jnp.float32))

    exported = jax.export.export(jax.jit(jax.grad(loss, (0, 1, 2))), platforms=["tpu"])(shape, shape, shape)
    assert "tpu_custom_call" in exported.mlir_module()
