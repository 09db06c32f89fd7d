"""Parameters that clients do not train, with any method and without a change of its code: they are not sent either."""

import jax

from fedjax_ssl.arrays import Key, PyTree
from fedjax_ssl.local.optimizers import Factors, is_fixed, path_of
from fedjax_ssl.method import ClientData, ClientOutput, Method
from fedjax_ssl.metrics import Sum, num_bytes
from fedjax_ssl.wrappers.compression import sent_bytes


def with_fixed(method: Method, factors: Factors) -> Method:
    """The method whose clients do not send the parameters that have the factor 0 in `factors`, as these do not change.

    Their updates are 0 already (`local.optimizers.with_factors`); `comm/bytes_up` no longer counts them, unless the server
    alone counts uploads (FedSiam-D).
    """
    if not any(factor == 0 for _, factor in factors) or not method.requires.clients:
        return method

    def client_update(shared: PyTree, per_client: PyTree, state: PyTree, data: ClientData, key: Key) -> ClientOutput:
        output = method.client_update(shared, per_client, state, data, key)
        if not isinstance(up := output.metrics.get("comm/bytes_up"), Sum):
            return output
        params = method.parameters(output.update)
        of_all = jax.tree_util.tree_leaves_with_path(params)
        trained = num_bytes([x for path, x in of_all if not is_fixed(factors, path_of(path))])
        sent = Sum(sent_bytes(up.total, num_bytes(output.update), num_bytes(params), trained))
        return output._replace(metrics={**output.metrics, "comm/bytes_up": sent})

    return method._replace(client_update=client_update)
