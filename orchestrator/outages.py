"""What a sweep's trials run on may die: the Ray of its own, a cluster's nodes, its head."""

import contextlib
import time
from collections.abc import Mapping

import psutil

from orchestrator.cluster import head_address, nodes, own_node_id, places, require_answer
from orchestrator.errors import LedgerError
from orchestrator.plan import Plan

RAY_PROCESSES = {"gcs_server", "raylet"}
"""Without one of them, a Ray that was started here is dead; others end with the raylet."""
HEAD_PATIENCE_SECONDS = 20.0
"""How long a cluster's head may be silent; after two minutes Ray itself ends the driver."""
ROOM_PATIENCE_SECONDS = 120.0
"""How long a cluster may have no node for a trial before the sweep stops: one may come back."""
NOTHING_IS_LOST = "nothing that was recorded is lost, and the same command goes on"


class RoomWatch:
    """Notices that nothing is left that could run a trial: Ray itself would wait for ever.

    A Ray of the sweep's own is dead without its processes, which this process started. A cluster
    may lose all nodes that have room and get others, or lose its head.
    """

    def __init__(self, plan: Plan, resources: Mapping[str, float]) -> None:
        """Know what to look for.

        Args:
            plan: of the sweep, for what Ray it runs on.
            resources: of one trial, `cpu` and `gpu`.
        """
        self._address = plan.spec.cluster.address if plan.is_on_cluster else None
        self._resources = resources
        self._last_answer = self._last_room = time.monotonic()

    def look(self) -> None:
        """Look once.

        Raises:
            LedgerError: the sweep's own Ray is dead; or a cluster's node on this machine is, or its
                head has not answered for `HEAD_PATIENCE_SECONDS`, or none of its living nodes has
                had room for a trial, in use or not, for `ROOM_PATIENCE_SECONDS`.
        """
        if self._address is None:
            self._require_own_ray()
        elif self._head_answers():
            self._require_room()

    def _require_own_ray(self) -> None:
        dead = RAY_PROCESSES - living_children()
        if dead:
            raise LedgerError(
                f"the sweep's own Ray on this machine has died ({', '.join(sorted(dead))} ended), "
                f"perhaps for lack of memory; {NOTHING_IS_LOST}"
            )

    def _head_answers(self) -> bool:
        """Whether the cluster's head does."""
        try:
            require_answer(head_address())
        except OSError:
            if time.monotonic() - self._last_answer > HEAD_PATIENCE_SECONDS:
                raise LedgerError(
                    f"the head of the cluster at {self._address} has not answered for "
                    f"{HEAD_PATIENCE_SECONDS:g} s; {NOTHING_IS_LOST}"
                ) from None
            return False
        self._last_answer = time.monotonic()
        return True

    def _require_room(self) -> None:
        found = nodes()
        if own_node_id() not in {node.node_id for node in found}:
            raise LedgerError(
                f"this machine's own node of the cluster at {self._address} has died, and Ray "
                f"starts no trial without it; {NOTHING_IS_LOST} once it is there again"
            )
        if places(found, self._resources):
            self._last_room = time.monotonic()
        elif time.monotonic() - self._last_room > ROOM_PATIENCE_SECONDS:
            raise LedgerError(
                f"no node of the cluster at {self._address} has had room for a trial for "
                f"{ROOM_PATIENCE_SECONDS:g} s; {NOTHING_IS_LOST} once there is one"
            )


def living_children() -> set[str]:
    """Names of the processes that this one started and that still run."""
    found = set()
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE:
                found.add(child.name())
    return found
