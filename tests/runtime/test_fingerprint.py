from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from specjax.runtime import fingerprint


def test_arrays_that_cannot_change_are_read_once_and_others_every_time(monkeypatch):
    read, real = [], fingerprint._digest
    monkeypatch.setattr(fingerprint, "_digest", lambda tree: (read.append(1), real(tree))[1])
    params = {"a": jnp.arange(3.0), "b": jnp.ones(2)}
    first = fingerprint.digest(params)
    assert fingerprint.digest(dict(params)) == first
    assert len(read) == 1
    assert fingerprint.digest({"a": params["b"], "b": params["a"]}) != first
    assert fingerprint.digest({"a": params["a"], "c": params["b"]}) != first
    assert fingerprint.digest(jax.tree.map(lambda x: x + 0, params)) == first
    changing = {"a": np.arange(3.0)}
    before = fingerprint.digest(changing)
    changing["a"][0] = 5
    assert fingerprint.digest(changing) != before
