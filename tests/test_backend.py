"""What is decided by the kind of device."""

import jax
import jax.numpy as jnp
import numpy as np

from specjax.backend import compiler_options, row_sums


def test_the_compiler_knows_its_options():
    assert jax.jit(lambda x: x + 1, compiler_options=compiler_options())(1) == 2


def test_rows_are_summed_one_by_one():
    rows = np.random.default_rng(0).normal(size=(5, 2, 30)).astype(np.float32)
    np.testing.assert_allclose(row_sums([*jnp.asarray(rows)]), rows.sum(axis=2).T, rtol=1e-5, atol=1e-6)
