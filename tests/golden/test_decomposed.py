"""What of its parameters a FedMatch client uploads, by hand; penalties and bytes are compared in `test_fedmatch`."""

import jax.numpy as jnp
import numpy as np

from fedjax_ssl.models import decomposed


def test_an_upload_carries_the_entries_that_changed():
    #                 same, by delta, up, down, small: by less than delta but 0 once sparse, by more, 0 before, by less
    known = np.array([0.5, 0.5, 0.5, 0.5, 0.1, 0.5, 0.0, 0.2])
    new = np.array([0.5, 0.5625, 0.7, 0.3, 0.04, 0.03, 0.04, 0.25])
    expected = np.array([0.5, 0.5, 0.7, 0.3, 0.04, 0.03, 0.0, 0.2])
    got = decomposed.changed({"w": jnp.float32(new)}, {"w": jnp.float32(known)}, threshold=0.05, delta=0.0625)
    np.testing.assert_allclose(got.value["w"], expected, rtol=1e-6)
    assert int(got.entries) == 4
    dense = decomposed.changed({"w": jnp.float32(new)}, {"w": jnp.float32(known)}, threshold=0.0, delta=0.0)
    np.testing.assert_array_equal(dense.value["w"], jnp.float32(new))
    assert int(dense.entries) == 7
