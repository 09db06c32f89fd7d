"""What a traced program is made of."""

from collections.abc import Iterator

from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params

PRODUCTS = ("dot_general", "conv_general_dilated")


def equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """All equations of a jaxpr, those of its loops, branches and calls too."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from equations(inner)


def products(jaxpr: Jaxpr) -> list[JaxprEqn]:
    """Those that multiply matrices, or convolve."""
    return [eqn for eqn in equations(jaxpr) if eqn.primitive.name in PRODUCTS]
