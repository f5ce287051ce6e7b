"""Which points a search tries next: Optuna by ask and tell, with the ledger as the record.

Nothing of Optuna's is stored. For every batch a study is made anew in memory from the points that
were tried, and its sampler is seeded by the search's seed and their number, so that a search that
was interrupted asks for what it would have asked for.

    tpe   tree-structured Parzen estimators (Bergstra et al., 2011); conditional parameters are its
          own, and points that halving stopped count as worse than those that went further
    gp    a Gaussian process with expected improvement; it wants every parameter in every point, so
          one that a point does not have stands at the middle of its range
    qmc   scrambled Sobol points (Owen, 1998), one coordinate for each parameter. Optuna's own
          sampler counts in its storage and takes no conditional parameters, so this one is SciPy's
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from orchestrator.axes import Assignment
from orchestrator.config import SearchConfig
from orchestrator.space import Choices, Parameter, Range, Space

if TYPE_CHECKING:
    import optuna

MOST_REPEATS = 200
"""Known points in a row after which a space counts as exhausted."""


@dataclass(frozen=True, slots=True)
class Told:
    """What is known about a point that was tried.

    Attributes:
        point: what it set.
        values: one value for each objective; of a stopped point, its loss in nats at its rung.
        stopped_at: tokens of the rung at which it stands; None for a finished point.
    """

    point: Assignment
    values: tuple[float, ...]
    stopped_at: int | None = None


def ask(
    space: Space,
    search: SearchConfig,
    told: Sequence[Told],
    count: int,
    num_asked: int,
    is_new: Callable[[Assignment], bool],
) -> list[Assignment]:
    """The next points, none of which is known.

    Args:
        space: of the search.
        search: sampler and its settings.
        told: points with results, in the order in which they were asked for.
        count: points wanted.
        num_asked: points asked for so far, with a result or without.
        is_new: whether a point is none of those tried and none that this call gave before; called
            once for each point, in order.

    Returns:
        Up to `count` points; fewer where the sampler finds no new ones.
    """
    if search.sampler == "qmc":
        return _sobol_points(space, search.seed, count, num_asked, is_new)
    return _study_points(space, search, told, count, num_asked, is_new)


def _study_points(
    space: Space,
    search: SearchConfig,
    told: Sequence[Told],
    count: int,
    num_asked: int,
    is_new: Callable[[Assignment], bool],
) -> list[Assignment]:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = _study(space, search, told, num_asked)
    points: list[Assignment] = []
    repeats = 0
    while len(points) < count and repeats < MOST_REPEATS:
        trial = study.ask()
        point = _drawn(space, search.sampler, trial)
        if is_new(point):
            points.append(point)  # stays open in the study, so that the next one keeps away
            repeats = 0
        else:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
            repeats += 1
    return points


def _study(
    space: Space, search: SearchConfig, told: Sequence[Told], num_asked: int
) -> "optuna.Study":
    """A study in memory that knows what was told."""
    import optuna

    direction = optuna.study.StudyDirection
    directions = {"loss": direction.MINIMIZE, "speed": direction.MAXIMIZE}
    study = optuna.create_study(
        directions=[directions[name] for name in search.objectives],
        sampler=_sampler(search, num_asked),
    )
    for item in told:
        parameters = space.active(item.point)
        if parameters is None:
            continue  # of an earlier, wider space
        values = {p.name: _internal(p, item.point[p.path]) for p in parameters}
        if search.sampler == "gp":
            parameters = space.parameters
            values = {p.name: _internal(p, p.values.at(0.5)) for p in parameters} | values
        is_stopped = item.stopped_at is not None
        state = optuna.trial.TrialState
        study.add_trial(
            optuna.trial.create_trial(
                state=state.PRUNED if is_stopped else state.COMPLETE,
                values=None if is_stopped else list(item.values),
                params=values,
                distributions={p.name: _distribution(p) for p in parameters},
                intermediate_values=(
                    {} if item.stopped_at is None else {item.stopped_at: item.values[0]}
                ),
            )
        )
    return study


def _sampler(search: SearchConfig, num_asked: int) -> "optuna.samplers.BaseSampler":
    import optuna

    seed = int(np.random.SeedSequence([search.seed, num_asked]).generate_state(1)[0])
    if search.sampler == "tpe":
        return optuna.samplers.TPESampler(
            seed=seed, n_startup_trials=search.startup_trials, constant_liar=True
        )
    return optuna.samplers.GPSampler(seed=seed, n_startup_trials=search.startup_trials)


def _drawn(space: Space, sampler: str, trial: "optuna.Trial") -> Assignment:
    """The point that a trial suggests; a Gaussian process suggests inactive parameters too."""
    values: dict[str, Any] = {}
    if sampler == "gp":
        values = {p.name: _suggested(trial, p) for p in space.parameters}

    def value_of(parameter: Parameter) -> Any:
        if sampler == "gp":
            return values[parameter.name]
        return _suggested(trial, parameter)

    return space.draw(value_of)


def _suggested(trial: "optuna.Trial", parameter: Parameter) -> Any:
    values = parameter.values
    if isinstance(values, Choices):
        return values.values[trial.suggest_categorical(parameter.name, range(len(values.values)))]
    if values.is_whole:
        return trial.suggest_int(
            parameter.name,
            int(values.low),
            int(_last(values)),
            step=int(values.step or 1),
            log=values.is_log,
        )
    return trial.suggest_float(
        parameter.name, values.low, _last(values), step=values.step, log=values.is_log
    )


def _distribution(parameter: Parameter) -> "optuna.distributions.BaseDistribution":
    from optuna import distributions

    values = parameter.values
    if isinstance(values, Choices):
        return distributions.CategoricalDistribution(range(len(values.values)))
    if values.is_whole:
        return distributions.IntDistribution(
            int(values.low), int(_last(values)), log=values.is_log, step=int(values.step or 1)
        )
    return distributions.FloatDistribution(
        values.low, _last(values), log=values.is_log, step=values.step
    )


def _internal(parameter: Parameter, value: Any) -> Any:
    """A value as Optuna knows it: choices by their position, since they may be any YAML value."""
    values = parameter.values
    return values.values.index(value) if isinstance(values, Choices) else value


def _last(values: Range) -> float:
    """The largest value that the steps reach."""
    if values.step is None:
        return values.high
    return values.low + values.step * math.floor((values.high - values.low) / values.step + 1e-9)


def _sobol_points(
    space: Space, seed: int, count: int, num_asked: int, is_new: Callable[[Assignment], bool]
) -> list[Assignment]:
    """The next points of one Sobol sequence: those asked for before are known, so passed over."""
    from scipy.stats import qmc

    parameters = space.parameters
    sequence = qmc.Sobol(len(parameters), scramble=True, rng=np.random.default_rng(seed))
    # A balanced sequence is drawn in powers of two.
    drawn = sequence.random_base2(math.ceil(math.log2(num_asked + count + MOST_REPEATS)))
    points: list[Assignment] = []
    for row in drawn:
        position = dict(zip((p.name for p in parameters), row.tolist(), strict=True))
        point = space.draw(lambda p, at=position: p.values.at(at[p.name]))  # type: ignore[misc]
        if is_new(point):
            points.append(point)
        if len(points) == count:
            break
    return points
