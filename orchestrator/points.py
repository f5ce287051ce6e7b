"""The points of a search in its ledger: what was asked for, how far each is, what comes next.

    SWEEP/search.jsonl    {"event": "asked", "number", "cell_id", "point"}
                          {"event": "promoted", "number", "tokens"}    sent on to a later rung

Everything else is read from the replicates' journals, so a search has no state of its own that
could disagree with them. Points that halving has stopped, and that wait, are not asked for at the
moment; their curves are kept, and with more points they may go on from their checkpoints.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orchestrator.axes import Assignment
from orchestrator.cells import Cell
from orchestrator.compose import resolve_points
from orchestrator.config import SearchConfig
from orchestrator.errors import ConfigError
from orchestrator.halving import promotable, rung_steps, rung_tokens
from orchestrator.identity import replicate_id
from orchestrator.journal import Journal, read_events
from orchestrator.ledger import ReplicateState
from orchestrator.plan import Plan, planned_record
from orchestrator.records import TrialRecord
from orchestrator.search import Told, ask


@dataclass(frozen=True, slots=True)
class Point:
    """One point of a search.

    Attributes:
        number: in the order of asking, from 0.
        assignment: what it sets.
        cell: the trial that it resolves to.
        target: the rung that it was sent to, from 0.
    """

    number: int
    assignment: Assignment
    cell: Cell
    target: int


@dataclass(frozen=True, slots=True)
class Search:
    """A search as its ledger has it.

    Attributes:
        plan: of the sweep.
        settings: `search` of the sweep file.
        rungs: tokens at which points are judged; the last one is the budget.
        points: those that the space has, in the order of asking.
        num_asked: all that were ever asked for.
        states: of every replicate of every point.
        by_seed: of every replicate, its loss in nats at each rung that it has reached.
        losses: for each rung, the mean loss of every point that was sent to it and has reached it
            with all seeds.
    """

    plan: Plan
    settings: SearchConfig
    rungs: list[int]
    points: list[Point]
    num_asked: int
    states: dict[str, ReplicateState]
    by_seed: dict[str, list[float]]
    losses: list[dict[int, float]]

    def names(self, point: Point) -> list[str]:
        """Replicates of a point, one for each seed."""
        return [replicate_id(point.cell.cell_id, seed) for seed in self.plan.spec.seeds]

    def is_at_target(self, point: Point) -> bool:
        """Whether all seeds of a point have come as far as it was sent."""
        return point.number in self.losses[point.target]

    def is_due(self, point: Point, name: str) -> bool:
        """Whether a replicate of a point has not come as far as the point was sent."""
        return not self.states[name].is_result and len(self.by_seed[name]) <= point.target


def journal_path(plan: Plan) -> Path:
    """Where a search writes what it asked for."""
    return plan.ledger.folder / "search.jsonl"


def read_search(plan: Plan) -> Search:
    """What a search has asked for and how far it is; reads only.

    Raises:
        ConfigError: other rungs than the ledger's, or none that fit the budget.
    """
    settings, space = plan.spec.search, plan.sweep.space
    assert settings is not None
    assert space is not None
    _refuse_other_rungs(plan, settings)
    try:
        rungs = rung_tokens(settings.asha, plan.sweep.cells[0].config.budget.tokens)
        for cell in plan.sweep.cells:
            rung_steps(rungs, cell.config)
    except ValueError as error:
        raise ConfigError(f"{plan.sweep.conf_path.name}: {error}") from None
    path = journal_path(plan)
    events = read_events(path)[0] if path.is_file() else []
    asked = {e["number"]: e for e in events if e["event"] == "asked"}
    sent = {e["number"]: e["tokens"] for e in events if e["event"] == "promoted"}
    known = {n: e for n, e in asked.items() if space.active(e["point"]) is not None}
    cells = resolve_points(plan.sweep, [event["point"] for event in known.values()])
    points = [
        Point(n, e["point"], cell, sum(t <= sent.get(n, rungs[0]) for t in rungs) - 1)
        for (n, e), cell in zip(known.items(), cells, strict=True)
    ]
    moved = sum(point.cell.cell_id != asked[point.number]["cell_id"] for point in points)
    if moved:
        note = (
            f"{moved} points are other cells than when they were asked for, since defaults in the "
            "code have changed; they are trained again"
        )
        plan = replace(plan, notes=[*(n for n in plan.notes if n != note), note])
    return _measured(Search(plan, settings, rungs, points, len(asked), {}, {}, []))


def _measured(search: Search) -> Search:
    """The same search with what the journals say about its points."""
    names = [name for point in search.points for name in search.names(point)]
    states = search.plan.ledger.states(names)
    search = replace(search, states=states, by_seed={}, losses=[{} for _ in search.rungs])
    for point in search.points:
        names = search.names(point)
        search.by_seed.update({name: _seed_losses(search, point, name) for name in names})
        reached = min(len(search.by_seed[name]) for name in names)
        for rung in range(min(reached, point.target + 1)):
            total = math.fsum(search.by_seed[name][rung] for name in names)
            search.losses[rung][point.number] = total / len(names)
    return search


def _refuse_other_rungs(plan: Plan, settings: SearchConfig) -> None:
    if not plan.ledger.exists or not journal_path(plan).is_file():
        return
    before = (plan.ledger.spec().get("search") or {}).get("asha")
    now = settings.asha and {
        "min_tokens": settings.asha.min_tokens,
        "reduction": settings.asha.reduction,
    }
    if before != now:
        raise ConfigError(
            f"search {plan.spec.name} has points that were judged with asha={before}, but this "
            f"call says {now}; use the same, or another name"
        )


def _seed_losses(search: Search, point: Point, name: str) -> list[float]:
    """Loss in nats of one replicate at each rung it has reached.

    A diverged one counts from then on with its loss before the first step, and no loss counts with
    more, so that a divergence costs as much as learning nothing and not an arbitrary amount.
    """
    state = search.states[name]
    if not state.attempts:
        return []
    curve = search.plan.ledger.curve(name, state.attempts)
    measured = {p.step: p.val_loss_nats for p in curve if p.val_loss_nats is not None}
    if state.status == "completed":
        measured[point.cell.config.num_steps] = state.end["val_loss_nats"]
    worst = state.start.get("init_loss_nats", math.inf)
    losses: list[float] = []
    for step in rung_steps(search.rungs, point.cell.config):
        if step in measured:
            losses.append(min(measured[step], worst))
        elif state.status == "diverged":
            losses.append(worst)
        else:
            break
    return losses


def told(search: Search) -> list[Told]:
    """The results that a sampler learns from, in the order of asking."""
    found = []
    for point in search.points:
        reached = [r for r, losses in enumerate(search.losses) if point.number in losses]
        if not reached:
            continue
        loss, is_end = (
            search.losses[reached[-1]][point.number],
            reached[-1] + 1 == len(search.rungs),
        )
        values: tuple[float, ...] | None = (loss,)
        if "speed" in search.settings.objectives:
            speed = _speed(search, point)
            values = None if speed is None else (loss, speed)
        if values is not None:
            stopped_at = None if is_end else search.rungs[reached[-1]]
            found.append(Told(point.assignment, values, stopped_at))
    return found


def _speed(search: Search, point: Point) -> float | None:
    """Geometric mean of tokens/s over the seeds that did not diverge, 0 where all did."""
    completed = [s for n in search.names(point) if (s := search.states[n]).status == "completed"]
    if not completed:
        return 0.0
    if any(state.needs_speed for state in completed):
        return None
    logs = [math.log(state.speed["tokens_per_second"]) for state in completed]
    return math.exp(math.fsum(logs) / len(logs))


def extended_search(plan: Plan, tried: Iterable[str]) -> Plan:
    """The plan of a search with what it asks for next; reads only.

    First comes what was asked for and is not there yet, failed replicates included; then points
    that go on to their next rung, and new points.

    Args:
        plan: of the sweep.
        tried: replicates that this call has already run; those that failed are left alone.
    """
    search = read_search(plan)
    given_up = set(tried)
    if any(
        name not in given_up and search.is_due(point, name)
        for point in search.points
        for name in search.names(point)
    ):
        return _planned(search, [])
    is_last = search.num_asked >= search.settings.trials
    asks = [] if is_last else _asks(search)
    promoted = _promotions(search, is_last=is_last or not asks)
    points = [replace(p, target=promoted.get(p.number, p.target)) for p in search.points]
    events = [
        {"event": "promoted", "number": number, "tokens": search.rungs[rung]}
        for number, rung in sorted(promoted.items())
    ]
    for number, (assignment, cell) in enumerate(asks, start=search.num_asked):
        points.append(Point(number, assignment, cell, 0))
        events.append(
            {"event": "asked", "number": number, "cell_id": cell.cell_id, "point": assignment}
        )
    extended = _measured(replace(search, points=points))
    return _planned(extended, events)


def _promotions(search: Search, *, is_last: bool) -> dict[int, int]:
    """Points that go on and the rung they go to; those whose seeds have all diverged stay."""
    if search.settings.asha is None:
        return {}
    found = promotable(
        search.losses,
        {point.number: point.target for point in search.points},
        search.settings.asha.reduction,
        is_last=is_last,
    )
    ended = {
        point.number
        for point in search.points
        if all(search.states[name].is_result for name in search.names(point))
    }
    return {number: rung for number, rung in found.items() if number not in ended}


def _asks(search: Search) -> list[tuple[Assignment, Cell]]:
    """The next batch of points, each with its cell; a cell that is known is no new point."""
    assert search.plan.sweep.space is not None
    known = {point.cell.cell_id for point in search.points}
    fresh: list[tuple[Assignment, Cell]] = []

    def is_new(assignment: Assignment) -> bool:
        cell = resolve_points(search.plan.sweep, [assignment])[0]
        if cell.cell_id in known:
            return False
        known.add(cell.cell_id)
        fresh.append((assignment, cell))
        return True

    ask(
        search.plan.sweep.space,
        search.settings,
        told(search),
        min(search.settings.batch, search.settings.trials - search.num_asked),
        search.num_asked,
        is_new,
    )
    return fresh


def _planned(search: Search, events: list[dict[str, Any]]) -> Plan:
    """The plan in which results, and what is due, are asked for, each as far as it was sent."""
    plan = search.plan  # with the notes of reading it
    desired: dict[str, TrialRecord] = {}
    pause_steps: dict[str, int] = {}
    for point in search.points:
        steps = rung_steps(search.rungs, point.cell.config)
        for seed in plan.spec.seeds:
            record = planned_record(plan.spec.name, point.cell, seed)
            name = record.replicate_id
            if not (search.states[name].is_result or search.is_due(point, name)):
                continue
            desired[name] = record
            # Rung by rung, so that a seed that was added later is judged at each of them too.
            next_rung = min(len(search.by_seed[name]), point.target)
            if next_rung + 1 < len(search.rungs):
                pause_steps[name] = steps[next_rung]
    cells = [point.cell for point in search.points]
    return replace(
        plan,
        sweep=replace(plan.sweep, cells=cells or plan.sweep.cells),
        desired=desired,
        states={name: search.states[name] for name in desired},
        undesired=[name for name in plan.ledger.replicate_ids() if name not in desired],
        pause_steps=pause_steps,
        asks=events,
    )


def record_asks(plan: Plan) -> None:
    """Journal what a plan of a search has decided, before any of it runs."""
    if not plan.asks:
        return
    journal = Journal(journal_path(plan))
    for event in plan.asks:
        journal.append(event)
    journal.close()


def search_lines(plan: Plan) -> list[str]:
    """What a search found: the best point, or the points of its front, in words."""
    search = read_search(plan)
    results = [item for item in told(search) if item.stopped_at is None]
    stopped = len(search.losses[0]) - len(search.losses[-1])
    lines = [
        f"{len(search.losses[-1])} of {search.num_asked} points were trained to the end, "
        f"{stopped} stopped before"
    ]
    for item in _front(results):
        setting = ", ".join(
            f"{path}={value:.4g}" if isinstance(value, float) else f"{path}={value}"
            for path, value in item.point.items()
        )
        speed = f", {item.values[1]:,.0f} tokens/s" if len(item.values) > 1 else ""
        lines.append(f"best: loss {item.values[0]:.4f} nats{speed} with {setting}")
    return lines


def _front(results: list[Told]) -> list[Told]:
    """Results that no other one beats in every objective, by loss."""
    costs = {id(item): (item.values[0], *(-v for v in item.values[1:])) for item in results}
    kept = [
        item
        for item in results
        if not any(
            costs[id(other)] != costs[id(item)]
            and all(a <= b for a, b in zip(costs[id(other)], costs[id(item)], strict=True))
            for other in results
        )
    ]
    return sorted(kept, key=lambda item: item.values)
