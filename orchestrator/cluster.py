"""The Ray that trials run on: one started here for a sweep, or a cluster that is there already.

A node of a cluster needs this checkout and the sweep's root at the same paths as here, and the same
versions; each is asked before the first trial.
"""

import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import psutil

# Read by Ray when it is imported, so they come first.
os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")
os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
# Training is what the machine is there for: 15, Ray's own, is for interactive machines.
os.environ.setdefault("RAY_worker_niceness", "0")
# A call to a head that has died can't be interrupted for as long as the first, and the second ends
# the driver on the spot (60 s both): shorter and longer, so that it can say so and tidy up.
os.environ.setdefault("RAY_gcs_server_request_timeout_seconds", "20")
os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "120")
os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
os.environ.setdefault("TUNE_DISABLE_SIGINT_HANDLER", "1")
os.environ.setdefault("TUNE_GLOBAL_CHECKPOINT_S", "86400")
os.environ.setdefault("TUNE_WARN_INSUFFICENT_RESOURCE_THRESHOLD_S", "86400")


import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.errors import ConfigError
from orchestrator.hardware import this_machine
from orchestrator.leases import living
from orchestrator.plan import Plan
from orchestrator.provenance import CHECKOUT, fingerprints

OBJECT_STORE_BYTES = 100 * 2**20
"""Jobs are small and data is memory-mapped, so Ray's shared memory stays small."""
ORPHAN_GRACE_SECONDS = 5.0
ANSWER_SECONDS = 5.0
NODE_PATIENCE_SECONDS = 120.0
"""How long a node has to answer; the first worker process on it takes seconds to start."""
LOSS_PATIENCE_SECONDS = 90.0
"""How long a node may neither answer nor be found lost.

Ray's own checks, at their defaults, find one in 15 s where its process ended and in 65 s where its
host is silent.
"""
ASK_SECONDS = 1.0

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Node:
    """One node that trials can run on.

    Attributes:
        node_id: Ray's name for it.
        host: its own name.
        cpus: cores that Ray hands out.
        gpus: GPUs that Ray hands out.
    """

    node_id: str
    host: str
    cpus: float
    gpus: float


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What a node says about itself.

    Attributes:
        fingerprints: of the code and packages that it would train with.
        reads: whether it sees what the driver wrote under the root.
        unix_seconds: its clock.
        asked_at_unix_seconds: this machine's clock, when the answer came.
    """

    fingerprints: dict[str, str]
    reads: bool
    unix_seconds: float
    asked_at_unix_seconds: float = 0.0


@contextmanager
def ray_session(plan: Plan) -> Iterator[None]:
    """The sweep's Ray for a `with` block; behind it, none of its workers is left on this host.

    Ray sets a handler of its own for SIGTERM when it starts, which exits; the one that was there is
    put back at once.

    Raises:
        ConfigError: there is no such cluster, or its nodes cannot run this sweep.
    """
    if not (plan.to_run or plan.to_time):
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    others, own = set(psutil.Process().children()), list[psutil.Process]()
    try:
        if plan.is_on_cluster:
            connect(str(plan.spec.cluster.address), _environment(plan))
        else:
            _start(plan)
            own = [p for p in psutil.Process().children(recursive=True) if p not in others]
        signal.signal(signal.SIGTERM, before)
        # How trials end is in their journals; Tune would print each failure's way through Ray.
        logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
        if plan.is_on_cluster:
            refuse_unfit(plan, nodes())
        yield
    finally:
        ray.shutdown()
        signal.signal(signal.SIGTERM, before)
        _end(own)  # where a part of Ray was killed, others would stay for a minute or longer
        reap_orphans(plan)


def _start(plan: Plan) -> None:
    """Start a Ray on this machine; once more where it was too busy for the first.

    Raises:
        ConfigError: Ray has not come up in either.
    """
    for is_last in (False, True):
        try:
            _start_once(plan)
            return
        except Exception as error:
            # Ray raises no narrower class, and waits half a minute whatever it is told.
            if "timed out during startup" not in str(error):
                raise
            ray.shutdown()
            if is_last:
                raise ConfigError(
                    "Ray did not start on this machine within 30 s, twice; it may be too busy, and "
                    "the same command tries again"
                ) from None


def _start_once(plan: Plan) -> None:
    ray.init(
        address="local",  # whatever RAY_ADDRESS says
        num_cpus=this_machine().cpus,
        num_gpus=len(this_machine().gpus) if plan.device == "cuda" else 0,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=OBJECT_STORE_BYTES,
        runtime_env={"env_vars": _environment(plan)},
        # Workers started ahead are never given to a trial, whose environment is another one.
        _system_config={"prestart_worker_first_driver": False},
    )


def connect(address: str, environment: dict[str, str]) -> None:
    """Join the cluster at `address`, its workers with these environment variables.

    Raises:
        ConfigError: no cluster answers there, or it takes no driver such as this one.
    """
    try:
        require_answer(address)
        ray.init(
            address=address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env={"env_vars": environment},
        )
    except (OSError, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"cluster.address={address}: no Ray cluster can be joined there ({reason}); give "
            "HOST:PORT of its head, as `ray start --head` prints it, from a machine of the cluster"
        ) from None


def require_answer(address: str) -> None:
    """Asks whether somebody listens, since Ray itself would go on trying for minutes.

    Args:
        address: `HOST:PORT`; without a port nobody is asked.

    Raises:
        OSError: nobody answers.
    """
    host, _, port = address.rpartition(":")
    if port.isdigit():
        socket.create_connection((host, int(port)), timeout=ANSWER_SECONDS).close()


def _environment(plan: Plan) -> dict[str, str]:
    found = worker_environment() | {"OMP_NUM_THREADS": str(plan.threads)}
    if plan.device == "cpu":
        # Where Linux gives pages of 2 MiB on request, glibc asks for them: what a step touches is
        # more than a processor remembers the places of (log, "huge pages").
        found["GLIBC_TUNABLES"] = os.environ.get("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    return found


def worker_environment() -> dict[str, str]:
    """Workers import this checkout, whatever their working directory is."""
    path = os.pathsep.join(p for p in (str(CHECKOUT), os.environ.get("PYTHONPATH", "")) if p)
    return {"PYTHONPATH": path}


def nodes() -> list[Node]:
    """The living nodes of the Ray that this process is connected to."""
    return [
        Node(
            node_id=node["NodeID"],
            host=node["NodeManagerHostname"],
            cpus=node["Resources"].get("CPU", 0.0),
            gpus=node["Resources"].get("GPU", 0.0),
        )
        for node in ray.nodes()  # type: ignore[no-untyped-call]
        if node["Alive"]
    ]


def head_address() -> str:
    """Where the head of the cluster listens."""
    return str(ray.get_runtime_context().gcs_address)


def own_node_id() -> str:
    """Ray's name for the node that this process is on."""
    return str(ray.get_runtime_context().get_node_id())


def places(found: Sequence[Node], resources: Mapping[str, float]) -> int:
    """How many trials that need these resources, `cpu` and `gpu`, these nodes hold at a time."""
    total = 0
    for node in found:
        have = {"cpu": node.cpus, "gpu": node.gpus}
        # A share such as 0.1 is not exact in binary: ten of them are one GPU.
        total += min(int(have[key] / need + 1e-9) for key, need in resources.items() if need)
    return total


def lost_since(before: Sequence[Node]) -> bool:
    """Whether one of these nodes is gone.

    What Ray says of a worker on a lost node does not tell: a closed socket, or a dead process. And
    Ray lists a node as living until it has missed several checks. So each is asked, which ends with
    its answer or with its name gone from the list.
    """
    names = {node.node_id for node in before}
    asked = {_ask_node(node, _own_pid): node for node in before}
    deadline = time.monotonic() + LOSS_PATIENCE_SECONDS
    while not (is_lost := bool(names - {node.node_id for node in nodes()})):
        if not asked or time.monotonic() > deadline:
            break
        for reference in ray.wait(list(asked), timeout=ASK_SECONDS)[0]:
            node = asked.pop(reference)
            try:
                ray.get(reference)
            except ray.exceptions.RayError:
                time.sleep(ASK_SECONDS)
                asked[_ask_node(node, _own_pid)] = node
    return is_lost


def whole_node(plan: Plan) -> dict[str, float]:
    """Resources that leave no room for another trial beside: all of the largest node that fits."""
    if not plan.is_on_cluster:
        return {"cpu": this_machine().cpus, "gpu": plan.ranks if plan.device == "cuda" else 0}
    largest = max(nodes(), key=lambda node: (node.gpus if plan.device == "cuda" else 0, node.cpus))
    return {"cpu": largest.cpus, "gpu": largest.gpus if plan.device == "cuda" else 0}


def refuse_unfit(plan: Plan, found: Sequence[Node]) -> None:
    """Refuses a cluster no node of which has room for a trial, or whose nodes would train unlike.

    Raises:
        ConfigError: need and have per node, or what differs on which node.
    """
    loss = plan.spec.lanes.loss
    gpus = loss.gpus if plan.device == "cuda" else 0
    cpus = plan.threads * plan.ranks
    if not any(node.cpus >= cpus and node.gpus >= gpus for node in found):
        have = "; ".join(f"{n.host} has {n.cpus:g} cores and {n.gpus:g} GPUs" for n in found)
        raise ConfigError(
            f"a trial needs {cpus} cores and {gpus:g} GPUs, and no node has them: {have}"
        )
    here = fingerprints()
    for node, facts in facts_of_nodes(plan.root, found):
        if not facts.reads:
            raise ConfigError(
                f"node {node.host} does not see {plan.root}; put --root on storage that all nodes "
                "mount at the same path"
            )
        if facts.fingerprints != here:
            raise ConfigError(
                f"node {node.host} would train with {_shown(facts.fingerprints)}, this machine "
                f"with {_shown(here)}; bring both to the same code and packages"
            )


def facts_of_nodes(root: Path, found: Sequence[Node]) -> list[tuple[Node, NodeFacts]]:
    """What every node says about itself, one after the other, so that clocks can be compared."""
    with _token(root) as token:
        return [
            (node, replace(facts, asked_at_unix_seconds=time.time()))
            for one in found
            for node, facts in on_each_node([one], _facts, str(token))
        ]


@contextmanager
def joined(address: str) -> Iterator[None]:
    """A Ray cluster, joined for a `with` block.

    Raises:
        ConfigError: none answers at the address.
    """
    connect(address, worker_environment())
    try:
        yield
    finally:
        ray.shutdown()


def _shown(ids: dict[str, str]) -> str:
    return ", ".join(f"{key} {value}" for key, value in ids.items())


@contextmanager
def _token(root: Path) -> Iterator[Path]:
    """A file under the root, for other nodes to look for."""
    root.mkdir(parents=True, exist_ok=True)
    path = root / f".seen-{os.getpid()}-{time.time_ns()}"
    path.write_text("seedfront")
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def _facts(token: str) -> NodeFacts:
    reads = Path(token).is_file()
    return NodeFacts(fingerprints=fingerprints(), reads=reads, unix_seconds=time.time())


def on_each_node(
    found: Sequence[Node], ask: Callable[..., Answer], *arguments: Any
) -> list[tuple[Node, Answer]]:
    """What a function returns on each node, called there at the same time.

    Raises:
        ConfigError: a node that does not answer in `NODE_PATIENCE_SECONDS`.
    """
    asked = [_ask_node(node, ask, *arguments) for node in found]
    answers = []
    for node, reference in zip(found, asked, strict=True):
        try:
            answers.append((node, ray.get(reference, timeout=NODE_PATIENCE_SECONDS)))
        except ray.exceptions.RayError as error:
            last = str(error).strip().splitlines()[-1]
            raise ConfigError(f"node {node.host} cannot run a task ({last})") from None
    return answers


def _ask_node(node: Node, ask: Callable[..., Answer], *arguments: Any) -> ray.ObjectRef[Answer]:
    strategy = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
    task = ray.remote(ask).options(num_cpus=0, max_retries=0, scheduling_strategy=strategy)
    return cast("ray.ObjectRef[Answer]", task.remote(*arguments))


def reap_orphans(plan: Plan) -> int:
    """End processes on this host that an earlier, killed driver left behind; returns how many."""
    states = plan.ledger.states(plan.ledger.replicate_ids())
    processes = living(state.start for state in states.values() if state.status == "running")
    _end(processes)
    return len(processes)


def _end(processes: Sequence[psutil.Process]) -> None:
    """End processes: by SIGTERM, and those that outlive it for long by SIGKILL."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(processes, timeout=ORPHAN_GRACE_SECONDS)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=ORPHAN_GRACE_SECONDS)


def _own_pid() -> int:
    return os.getpid()


def probe_ray() -> str:
    """Start a local Ray, run one task in a worker, stop it; returns what was seen."""
    ray.init(
        address="local",
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=OBJECT_STORE_BYTES,
    )
    try:
        task = ray.remote(_own_pid)
        worker = ray.get(task.remote(), timeout=60)
    finally:
        ray.shutdown()
    return f"Ray {ray.__version__} runs a task in a worker (pid {worker})"
