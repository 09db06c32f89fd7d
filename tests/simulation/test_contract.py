"""What a method returns against its contract is one line before anything is compiled, and no wrong number."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_ssl.data.profiles import Profiles
from fedjax_ssl.local import Server, ServerState, Weights
from fedjax_ssl.local.server import average_with_server, server_step
from fedjax_ssl.method import Aggregate, ClientOutput, Requires
from fedjax_ssl.metrics import Mean, PerClient, Sum, mean
from fedjax_ssl.simulation import contract, rng
from fedjax_ssl.simulation.execution import Execution
from fedjax_ssl.simulation.simulator import Simulator
from fedjax_ssl.simulation.system import System
from tests import toy

ONE = Sum(jnp.int32(1))


def wide_method():
    """As the toy's, with three numbers in place of one, and a float for each client as its state."""

    def client_update(shared, per_client, state, client_data, key):
        count = client_data.unlabeled.count.astype(jnp.float32)
        return ClientOutput({"w": -jnp.full(3, count)}, count, state + 0.5, {"client/loss": mean(count)})

    return toy.method()._replace(
        init=lambda key, spec: ({"w": jnp.zeros(3)}, jnp.zeros(spec.num_clients)),
        client_update=client_update,
        predict={"w": lambda server, images, mask: jnp.stack([images.reshape(-1) * w for w in server["w"][:2]], 1)},
    )


def client(**parts):
    """A change of what the clients return; a part is a function of the usual one."""

    def change(method):
        def update(*args):
            output = method.client_update(*args)
            return output._replace(**{name: of(getattr(output, name)) for name, of in parts.items()})

        return method._replace(client_update=update)

    return change


def server(function="server_update", **parts):
    """A change of what the server's work gives: `state` and `metrics` are functions of the usual one."""

    def change(method):
        def work(*args):
            new, metrics = getattr(method, function)(*args)
            return parts.get("state", lambda x: x)(new), parts.get("metrics", lambda x: x)(metrics)

        return method._replace(**{function: work})

    return change


def metric(name, value=ONE):
    return lambda metrics: {**metrics, name: value}


def predicting(of):
    return lambda method: method._replace(predict={"w": lambda *args: of(method.predict["w"](*args))})


def replaced(**fields):
    return lambda method: method._replace(**fields)


def in_lists(method):
    """The method with each client's state in a list, of which its clients make a tuple."""

    def update(shared, per_client, state, *rest):
        return method.client_update(shared, per_client, state[0], *rest)._replace(client_state=(state[0],))

    return method._replace(init=lambda *args: (method.init(*args)[0], [method.init(*args)[1]]), client_update=update)


OWNED = (
    "round",
    "checksum",
    "time/round_s",
    "cost/forward_passes",
    "eval/loss",
    "sim/absent",
    "client/participants",
    "clients",
)
ITS_OWN = "got a name of the simulation's own, accepted: another one"
PLACES = "'server' or 'clients' or 'some_clients', in a tuple"
REFUSED = {
    "client_update: got tuple, accepted: ClientOutput": replaced(client_update=lambda *_: ({}, 1.0)),
    "client_update: update: got float32[1] at ['w'], accepted: float32[3], as it was broadcast": client(
        update=lambda update: {"w": update["w"][:1]}
    ),
    "client_update: update: got int32[3] at ['w'], accepted: float32[3], as it was broadcast": client(
        update=lambda update: {"w": update["w"].astype(jnp.int32)}
    ),
    "client_update: update: got float32[1], accepted: float32[3], as it was broadcast": client(
        update=lambda update: update["w"][:1]
    ),
    "client_update: update: got float32[1] at ['of']['w'], accepted: float32[3], as it was broadcast": client(
        update=lambda update: {"of": {"w": update["w"][:1]}}
    ),
    "client_update: weight: got float32[1], accepted: a scalar": client(weight=lambda weight: weight[None]),
    "client_update: client_state: got int32[], accepted: float32[], as the method's init gives it": client(
        client_state=lambda state: state.astype(jnp.int32)
    ),
    "client_update: client_state: got float32[2], accepted: float32[], as the method's init gives it": client(
        client_state=lambda state: jnp.stack([state, state])
    ),
    "client_update: client_state: got nothing, accepted: float32[], as the method's init gives it": client(
        client_state=lambda _: ()
    ),
    "client_update: client_state: got PyTreeDef((*,)), accepted: PyTreeDef([*]), as the method's init gives it": in_lists,
    "client_update: metric 'loss': got float, accepted: metrics.mean(values, mask), or Mean, Sum, PerClient": client(
        metrics=metric("loss", 3.0)
    ),
    "client_update: metric 'loss': got float32[3], float32[3], accepted: scalars": client(
        metrics=metric("loss", Mean(jnp.ones(3), jnp.ones(3)))
    ),
    "client_update: metric 3: got int, accepted: a text as its name": client(metrics=metric(3)),
    "client_update: metrics: got NoneType, accepted: a mapping of names to metrics": client(metrics=lambda _: None),
    **{f"client_update: metric '{name}': {ITS_OWN}": client(metrics=metric(name)) for name in OWNED},
    "server_update: metric 'client/loss': got a name that client_update has, too, accepted: another one": server(
        metrics=metric("client/loss")
    ),
    f"server_update: metric 'round': {ITS_OWN}": server(metrics=metric("round")),
    "server_update: metric 'x': got PerClient, accepted: metrics.mean(values, mask), or Mean, Sum": server(
        metrics=metric("x", PerClient(jnp.ones(())))
    ),
    "server_update: metric 'x': got int32[2], int32[], accepted: scalars, or arrays [5] of the cohort's clients": server(
        metrics=metric("x", Sum(jnp.ones(2, jnp.int32)))
    ),
    "server_update: server: got int32[3] at ['w'], accepted: float32[3], as the method's init gives it": server(
        state=lambda state: {"w": state["w"].astype(jnp.int32)}
    ),
    "server_update: server: got float32[1, 3] at ['w'], accepted: float32[3], as the method's init gives it": server(
        state=lambda state: {"w": state["w"][None]}
    ),
    "server_update: server: got int32[] at ['more'], accepted: nothing, as the method's init gives it": server(
        state=lambda state: {**state, "more": jnp.int32(1)}
    ),
    "server_update: got dict, accepted: a pair (server, metrics)": replaced(server_update=lambda state, *_: state),
    "prepare: server: got float32[1] at ['w'], accepted: float32[3], as the method's init gives it": server(
        "prepare", state=lambda state: {"w": state["w"][:1]}
    ),
    f"prepare: metric 'time/total_s': {ITS_OWN}": server(
        "prepare", metrics=metric("time/total_s")
    ),
    "prepare: metric 'client/loss': got a name that a round has, too, accepted: another one": server(
        "prepare", metrics=metric("client/loss")
    ),
    "init: the client states: got float32[6], accepted: a leading axis of 7, all clients": lambda method: method._replace(
        init=lambda *args: ({"w": jnp.zeros(3)}, jnp.zeros(6))
    ),
    "broadcast: per_client: got int32[4], accepted: a leading axis of 5, the cohort": replaced(
        broadcast=lambda server, clients, cohort: (server, cohort.ids[:4])
    ),
    "broadcast: got dict, accepted: a pair (shared, per_client)": replaced(broadcast=lambda server, *_: server),
    **{
        f"predict: 'w': got float32[4, {n}], accepted: logits float32[4, 2], of so many examples and classes": predicting(
            lambda logits, n=n: jnp.tile(logits, 3)[:, :n]
        )
        for n in (1, 3)
    },
    "predict: 'w': got float32[1, 2], accepted: logits float32[4, 2], of so many examples and classes": predicting(
        lambda logits: logits[:1]
    ),
    "predict: 'w': got int32[4, 2], accepted: logits float32[4, 2], of so many examples and classes": predicting(
        lambda logits: logits.astype(jnp.int32)
    ),
    "predict: got no function, accepted: names and functions, the first of which is evaluated": replaced(predict={}),
    "aggregator: got 'Stack', accepted: 'sum' or 'stack'": replaced(aggregator="Stack"),
    f"labels_at: got ('client',), accepted: {PLACES}": replaced(requires=Requires(("client",))),
    f"labels_at: got 'clients', accepted: {PLACES}": replaced(requires=Requires("clients")),
    "server_training: got ('before',), accepted: 'after' or 'parallel', in a tuple": replaced(
        requires=Requires(server_training=("before",))
    ),
    "views: got ('Strong',), accepted: 'labeled' or 'weak' or 'strong', in a tuple": replaced(
        requires=Requires(views=("Strong",))
    ),
    "method: got NoneType, accepted: a factory that returns a Method": lambda method: None,
}  # fmt: skip


@pytest.fixture
def uncompiled(monkeypatch):
    """No program of a simulator is compiled, nor run."""

    def fail(self, *_):
        raise AssertionError(f"{self} was compiled")

    monkeypatch.setattr("fedjax_ssl.simulation.program.Program.compiled", fail)


@pytest.mark.parametrize("said", REFUSED)
def test_what_is_against_the_contract_is_one_line_before_anything_is_compiled(uncompiled, said):
    made = REFUSED[said](wide_method())
    with pytest.raises(ValueError) as raised:
        Simulator(toy.problem()._replace(method=lambda _: made), Execution(1)).initialize()
    assert str(raised.value) == said


def test_an_update_may_have_another_precision_and_what_a_stack_is_made_of_any_form():
    halved = client(update=lambda update: {"w": update["w"].astype(jnp.bfloat16)})(wide_method())
    _, state, _ = toy.run(toy.problem(made=halved), Execution(1), 1)
    _, full, _ = toy.run(toy.problem(made=wide_method()), Execution(1), 1)
    np.testing.assert_allclose(state.server["w"], full.server["w"], rtol=0.02)

    def server_update(state, total, *_):
        return {"w": state["w"] + jnp.mean(total.update["w"])}, {}

    made = client(update=lambda update: {"w": update["w"][:1].astype(jnp.int8)})(wide_method())
    toy.run(toy.problem(made=made._replace(aggregator="stack", server_update=server_update)), Execution(1), 1)


def test_the_method_that_the_refused_ones_are_changes_of_runs():
    _, state, (row,) = toy.run(toy.problem(made=wide_method()), Execution(1), 1)
    assert state.server["w"].shape == (3,)
    took_part = np.asarray(state.clients) == 0.5
    assert took_part.sum() == 5
    assert row["client/loss"] == np.mean(np.array(toy.SIZES)[took_part])


@pytest.mark.parametrize(
    ("update", "sent"),
    [
        ({"w": 3, "distances": 7}, {"w": 3}),
        ((3, 7), (3, 0)),  # positions are no names
        ({"psi": {"kernel": 5}}, {"weights": {"sigma": {"kernel": 3}}}),
        ({"mean": {"w": 7}}, {"norm": {"w": 3}}),
        (3, {"w": 3, "rate": 0}),
        ({"w": 7}, {"w": 3, "last": {"w": 7}}),
        ({"w": 7}, ()),
    ],
)
def test_an_update_may_have_what_was_not_broadcast(update, sent):
    made = wide_method()

    def tree(sizes):
        return jax.tree.map(lambda size: jnp.zeros(size) if size else jnp.zeros(()), sizes)

    def client_update(*args):
        return made.client_update(*args)._replace(update=tree(update))

    changed = made._replace(
        broadcast=lambda server, clients, cohort: (tree(sent), ()),
        client_update=client_update,
        server_update=lambda server, aggregate, data, key: (server, {}),
    )
    state = Simulator(toy.problem(made=changed), Execution(1)).initialize()
    assert int(state.round) == 0  # nothing was refused while it was traced


WEIGHTS = Weights({"kernel": jnp.ones((2, 3))}, {"mean": jnp.ones(3)})
OTHERS = {
    "client_update: update: got dict, accepted: Weights of parameters and statistics, such as task.update(received, trained)": (
        WEIGHTS.params
    ),
    "client_update: update: got float32[1, 3] at .params['kernel'], accepted: float32[2, 3], as the global model's weights": (
        Weights({"kernel": jnp.ones((1, 3))}, ())
    ),
    "client_update: update: got nothing at .params['kernel'], accepted: float32[2, 3], as the global model's weights": (
        Weights({}, ())
    ),
    "client_update: update: got float32[] at .stats['mean'], accepted: float32[3], as the global model's weights": (
        WEIGHTS._replace(stats={"mean": jnp.ones(())})
    ),
}


@pytest.mark.parametrize("said", OTHERS)
def test_the_servers_usual_step_takes_an_update_that_is_like_its_weights_alone(said):
    aggregate = Aggregate(OTHERS[said], jnp.float32(1))
    state = ServerState(WEIGHTS, (), ())
    for step in (
        lambda: server_step(Server(optax.sgd(1.0), None, 0, None), WEIGHTS, optax.sgd(1.0).init(WEIGHTS.params), aggregate),
        lambda: average_with_server(state, state, aggregate),
    ):
        with pytest.raises(ValueError) as raised:
            step()
        assert str(raised.value) == said


def test_every_name_that_the_simulation_gives_is_its_own():
    """Of a round with all that may be reported of it: clients recorded, some late, and some left out."""
    method, sizes = client(weight=lambda weight: jnp.where(weight == 3, jnp.nan, weight))(wide_method()), toy.SIZES
    profiles = Profiles(*(np.full(len(sizes), rate, np.float32) for rate in (1.0, 1e3, 1e3)))
    problem = toy.problem(made=method)._replace(system=System(dropout=0.3, deadline_s=1e3, is_timed=True))
    problem = problem._replace(tables=({**problem.tables[0], "profiles": profiles},))
    simulator = Simulator(problem, Execution(1))
    state, ((row,),) = simulator.dispatch(simulator.initialize(), record=True)
    names = {*row, *row["clients"], *simulator.evaluate(state)[0]} - {"client/loss"}
    assert {"client/seconds", "client/id", "sim/dropped", "internal/fault", "eval/loss", "cost/forward_passes"} <= names
    assert {name for name in names if name not in contract.OWNED and not name.startswith(contract.OWNED_GROUPS)} == set()


STATES = [(name, False) for name in toy.EXECUTIONS] + [("scan", True)]


@pytest.mark.parametrize(("name", "on_host"), STATES)
def test_broadcast_gets_no_client_states_unless_it_asks_for_all_wherever_they_are(name, on_host):
    seen, base = [], toy.method()

    def broadcast(server, clients, cohort):
        seen.append(clients)
        return base.broadcast(server, clients, cohort)

    problem = toy.problem(made=base._replace(broadcast=broadcast), sizes=(*toy.SIZES, 3), on_host=on_host)
    Simulator(problem, toy.EXECUTIONS[name]).trace()
    assert seen == [None]


def test_broadcast_that_reads_all_client_states_has_the_same_numbers_on_any_devices():
    base, rows = toy.method(), {}

    def broadcast(server, clients, cohort):
        return {**server, "total": jnp.sum(clients).astype(jnp.float32)}, cohort.ids

    def update(shared, *rest):
        output = base.client_update(shared, *rest)
        return output._replace(metrics={"client/total": mean(shared["total"])})

    made = base._replace(broadcast=broadcast, client_update=update)
    with pytest.raises(ValueError, match=r"^broadcast: got None \(.*accepted: Requires with all_states=True where"):
        Simulator(toy.problem(made=made), Execution()).trace()
    made = made._replace(requires=Requires(all_states=True))
    for devices in (1, 2):
        _, _, rows[devices] = toy.run(toy.problem(made=made, sizes=(*toy.SIZES, 3)), Execution(devices=devices), 3)
        assert [row["client/total"] for row in rows[devices]] == [0, 5, 10]


@pytest.mark.parametrize(("seeds", "on_host"), [((0,), False), ((0,), True), ((0, 1, 2), False)])
def test_metrics_of_prepare_are_in_the_first_rows(seeds, on_host):
    def prepare(state, data, key):
        return state, {"server/prepared": mean(jax.random.uniform(key)), "server/count": ONE}

    simulator = Simulator(toy.problem(made=toy.method()._replace(prepare=prepare), seeds=seeds, on_host=on_host), Execution(1))
    state = simulator.initialize()
    state, (first,) = simulator.dispatch(state, [None] * len(seeds))
    _, (second,) = simulator.dispatch(state, [None] * len(seeds))
    drawn = [float(jax.random.uniform(rng.stream(jax.random.key(seed), "prepare"))) for seed in seeds]
    assert [row["server/prepared"] for row in first] == pytest.approx(drawn)
    assert [row["server/count"] for row in first] == [1] * len(seeds)
    assert not any("server/prepared" in row for row in second)
