"""A sweep that learns runs in rounds: what it asks for next depends on what came out.

A grid is one round. A search asks for points, and sends the best on; adaptive seeds add pairs where
a comparison is undecided. Both read what they need from the ledger each time, so a call that was
interrupted goes on where it was.
"""

from collections.abc import Collection
from dataclasses import replace

from orchestrator.adaptive import comparison_lines, extended_seeds
from orchestrator.plan import Plan
from orchestrator.points import extended_search, search_lines


def extended(plan: Plan, tried: Collection[str] = ()) -> Plan:
    """The plan against the ledger as it is now, with what the sweep asks for next; reads only.

    Args:
        plan: of the sweep, from an earlier round or from `make_plan`.
        tried: replicates that failed in this call, which no further round waits for.
    """
    if plan.spec.purpose == "search":
        return extended_search(plan, tried)
    if plan.spec.adaptive is not None:
        return extended_seeds(plan, tried)
    return plan.refreshed()


def next_round(plan: Plan, tried: Collection[str]) -> Plan | None:
    """The part of an extended plan that is to run now; None where nothing is."""
    desired = {name: record for name, record in plan.desired.items() if name not in tried}
    states = {name: plan.states[name] for name in desired}
    current = replace(plan, desired=desired, states=states)
    return current if current.to_run or current.to_time else None


def unreached(asked: Plan, ended: Plan) -> set[str]:
    """Replicates that a round has run without getting from them what it asked for."""
    states = ended.states
    loss = {n for n in asked.to_run if not (states[n].is_result or states[n].is_paused)}
    return loss | set(ended.to_time)


def summary(plan: Plan) -> list[str]:
    """What a search found, or where comparisons with adaptive seeds stand; nothing for a grid."""
    if plan.spec.purpose == "search":
        return search_lines(plan)
    return comparison_lines(plan) if plan.spec.adaptive is not None else []
