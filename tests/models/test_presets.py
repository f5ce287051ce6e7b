"""The published sweeps and the model sizes in `conf/` are the models they say."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from models.accounting import count_parameters
from models.configs import HeadLayout, ModelConfig
from orchestrator.compose import Sweep, load_sweep
from orchestrator.training.schedule import decay_steps, lr_ratio, warmup_steps

CONF = Path(__file__).parents[2] / "conf"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    (folder / "text.txt").write_text("The sources don't matter to a model's shape.")
    return folder


@cache
def preset(name: str, folder: Path, *overrides: str) -> Sweep:
    return load_sweep(f"paper/{name}", ["data.sources=[text.txt]", *overrides], folder)


def models(sweep: Sweep, **chosen: Any) -> Iterator[tuple[ModelConfig, int]]:
    """Model and parameters of each cell that has the chosen size and rank of routing."""
    for cell in sweep.cells:
        config, model = cell.config, cell.config.model
        values = {"size": config.size, "rank": model.routing.rank}
        if all(values[name] == value for name, value in chosen.items()):
            yield model, count_parameters(model, config.data.vocab_size).total


def totals(sweep: Sweep, **chosen: Any) -> dict[tuple[str, str, str], int]:
    """Parameters by mixer, stack and routing; arguments as of `models`."""
    return {
        (model.mixer.name, model.stack, model.routing.kind): parameters
        for model, parameters in models(sweep, **chosen)
    }


def test_the_main_table_holds_the_published_models(folder: Path) -> None:
    sweep = preset("main_table", folder)
    assert len(sweep.cells) == 18
    assert totals(sweep) == {
        ("softmax", "pure", "none"): 317_244_416,
        ("deltanet", "hybrid", "none"): 319_474_688,
        ("deltanet", "pure", "none"): 311_152_640,
        ("gated_deltanet", "hybrid", "none"): 313_354_416,
        ("gated_deltanet", "pure", "none"): 302_488_288,
        ("kimi_delta", "hybrid", "none"): 322_701_440,
        ("kimi_delta", "pure", "none"): 315_992_768,
        ("gated_deltanet2", "hybrid", "none"): 304_715_192,
        ("gated_deltanet2", "pure", "none"): 301_595_984,
    }


def test_the_plan_of_the_main_table_lists_what_its_cells_differ_in(folder: Path) -> None:
    decay, unequal = preset("main_table", folder).notes
    assert "gated_deltanet ones, kimi_delta loguniform, gated_deltanet2 ones" in decay
    assert "model.num_layers (24, 22, 20), model.ffn_dim (2560, 2816)" in unequal
    assert "optimizer.split (attention, fused)" in unequal


def test_the_main_table_asks_for_recall_within_a_window(folder: Path) -> None:
    config = preset("main_table", folder).cells[0].config
    recall = config.eval.recall
    assert recall.num_sequences == 256
    longest = max(*recall.lengths, 4 * max(recall.pairs), 4 * max(recall.chains) + 1)
    assert longest <= config.seq_len


def test_the_routing_sweep_holds_the_published_hosts(folder: Path) -> None:
    found = {
        (model.mixer.name, model.routing.kind, model.routing.rank, model.ffn_dim): parameters
        for model, parameters in models(preset("routing", folder))
    }
    hosts = {"gated_deltanet": 290_261_088, "deltanet": 276_458_240}
    for mixer, host in hosts.items():
        added = {key[1:]: total - host for key, total in found.items() if key[0] == mixer}
        assert added == {
            ("none", None, 2816): 0,
            ("cler", None, 2816): 14,
            ("cler_h", None, 2816): 7_340_032,
            ("cler_h", 64, 2816): 1_376_256,
            ("clvr", None, 2816): 7_340_032,
            ("clvr", 64, 2816): 1_376_256,
            ("surprise_gated", None, 2816): 7_340_032 + 14 * 2 * (8 if "gated" in mixer else 4),
            ("concatenated", None, 2816): 2 * 7_340_032,
            ("self_transform", 256, 2816): 14 * 2 * 1024 * 256,
            ("self_transform", 48, 2816): 14 * 2 * 1024 * 48,
            ("attention_residuals", None, 2816): 40_960,
            ("none", None, 2936): 7_372_800,
            ("none", None, 2840): 1_474_560,
        }


def test_error_routing_into_values_is_run_under_both_optimizers(folder: Path) -> None:
    cells = preset("routing", folder).cells
    adamw = [cell.config for cell in cells if cell.config.optimizer.name == "adamw"]
    assert sorted((c.model.mixer.name, c.model.routing.kind) for c in adamw) == [
        ("deltanet", "cler"),
        ("deltanet", "none"),
        ("gated_deltanet", "cler"),
        ("gated_deltanet", "none"),
    ]
    assert {cell.config.num_steps for cell in cells} == {1907}


def test_the_routing_sweep_has_the_collapsed_schedule_by_its_name(folder: Path) -> None:
    changes = ["kind=collapsed", "warmup_fraction=0.10488", "decay_fraction=3.0"]
    sweep = preset("routing", folder, *(f"schedule.{change}" for change in changes))
    schedule = sweep.cells[0].config.schedule
    rates = [3e-4 * lr_ratio(schedule, step, 1907) for step in (200, 201, 1000)]
    assert rates == pytest.approx([3e-4, 7.38e-5, 5.23e-5], rel=1e-3)


def test_the_larger_sweep_holds_the_published_models(folder: Path) -> None:
    sweep = preset("larger", folder)
    at_1p3b = totals(sweep, size="1p3b", rank=None)
    assert at_1p3b["deltanet", "hybrid", "none"] == 1_222_086_656
    assert at_1p3b["deltanet", "pure", "none"] == 1_188_729_856
    assert at_1p3b["gated_deltanet", "hybrid", "none"] == 1_231_261_184
    assert at_1p3b["gated_deltanet", "hybrid", "clvr"] == 1_231_261_184 + 33_554_432
    low_rank = totals(sweep, size="1p3b", rank=64)
    assert low_rank["gated_deltanet", "hybrid", "clvr"] == 1_231_261_184 + 3_145_728
    assert totals(sweep, size="3b") == {("deltanet", "hybrid", "none"): 3_072_726_784}


def test_the_larger_sweep_has_the_published_phases(folder: Path) -> None:
    phases = set()
    for cell in preset("larger", folder).cells:
        config = cell.config
        steps = (warmup_steps(config.schedule, config.num_steps), config.num_steps)
        decay = decay_steps(config.schedule, config.num_steps)
        phases.add((config.size, config.model.mixer.name, *steps, decay))
    assert phases == {
        ("1p3b", "deltanet", 50, 19_073, 1_907),
        ("1p3b", "gated_deltanet", 50, 19_073, 1_430),
        ("3b", "deltanet", 71, 7_152, 715),
    }


def test_the_supplementary_baselines_have_their_published_phases(folder: Path) -> None:
    cells = preset("baselines_1b", folder).cells
    assert len(cells) == 6
    for cell in cells:
        schedule, steps = cell.config.schedule, cell.config.num_steps
        assert (steps, warmup_steps(schedule, steps), decay_steps(schedule, steps)) == (
            1907, 13, 381,
        )  # fmt: skip


def test_a_published_comparison_evaluates_twenty_million_tokens(folder: Path) -> None:
    for name in ("main_table", "lr_ablation", "lr_ablation_all", "baselines_1b", "routing"):
        config = preset(name, folder).cells[0].config
        assert config.eval.windows is not None
        assert config.eval.windows * config.seq_len >= 20_000_000


def test_the_context_sweep_holds_the_published_models(folder: Path) -> None:
    sweep = preset("context", folder)
    assert totals(sweep) == {
        ("softmax", "pure", "none"): 18_550_016,
        ("gated_deltanet", "hybrid", "none"): 20_155_968,
        ("gated_deltanet", "pure", "none"): 20_762_336,
    }
    assert sorted({cell.config.seq_len for cell in sweep.cells}) == [2**n for n in range(10, 17)]
    assert {cell.config.windows_per_step * cell.config.seq_len for cell in sweep.cells} == {2**22}
    assert all(cell.config.model.recompute for cell in sweep.cells)


def test_the_learning_rate_sweep_holds_the_published_points(folder: Path) -> None:
    cells = preset("lr_ablation", folder).cells
    assert len(cells) == 3 * (7 + 6)
    for cell in cells:
        optimizer = cell.config.optimizer
        if optimizer.name == "muon" and cell.config.model.mixer.name == "softmax":
            assert optimizer.adam_lr == pytest.approx(4.1667 * optimizer.lr, rel=1e-4)


def test_the_redone_learning_rate_sweep_has_all_families_at_one_depth(folder: Path) -> None:
    cells = preset("lr_ablation_all", folder).cells
    assert len(cells) == 5 * (7 + 6)
    assert {cell.config.model.mixer.name for cell in cells} == {
        "softmax", "deltanet", "gated_deltanet", "kimi_delta", "gated_deltanet2",
    }  # fmt: skip
    assert {cell.config.model.num_layers for cell in cells} == {24}
    target = count_parameters(size("350m"), 1).non_embedding
    for cell in cells:
        count = count_parameters(cell.config.model, 1).non_embedding
        assert count == pytest.approx(target, rel=0.01)


def test_gated_rules_start_as_published(folder: Path) -> None:
    for cell in preset("main_table", folder).cells:
        mixer = cell.config.model.mixer
        expected = {"gated_deltanet": "ones", "gated_deltanet2": "ones", "kimi_delta": "loguniform"}
        assert getattr(mixer, "dt_init", None) == expected.get(mixer.name)


def size(name: str) -> ModelConfig:
    values = yaml.safe_load((CONF / "size" / f"{name}.yaml").read_text())
    assert values["size"] == name
    shape = values["model"]
    return ModelConfig(**{**shape, "heads": HeadLayout(**shape["heads"])})


@pytest.mark.parametrize(("name", "millions"), [("10m", 10), ("60m", 60)])
def test_a_size_is_named_by_its_parameters_outside_embedding_and_head(
    name: str, millions: int
) -> None:
    count = count_parameters(size(name), 0).non_embedding
    assert count / 1e6 == pytest.approx(millions, rel=0.1)


def test_the_350m_size_is_the_published_softmax_model() -> None:
    assert count_parameters(size("350m"), 32_000).total == 317_244_416


def test_the_default_model_is_the_nano_size() -> None:
    assert size("nano") == ModelConfig()


def test_every_size_is_named_after_its_file() -> None:
    assert {path.stem for path in (CONF / "size").glob("*.yaml")} >= {"nano", "1p3b", "3b"}
    for path in (CONF / "size").glob("*.yaml"):
        assert len(size(path.stem).layer_mixers()) == size(path.stem).num_layers
