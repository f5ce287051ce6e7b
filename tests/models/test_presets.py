"""The published sweeps and the model sizes in `conf/` are the models they say."""

from pathlib import Path

import pytest
import yaml

from models.accounting import count_parameters
from models.configs import HeadLayout, ModelConfig
from orchestrator.compose import Sweep, load_sweep

CONF = Path(__file__).parents[2] / "conf"


def preset(name: str, folder: Path) -> Sweep:
    (folder / "text.txt").write_text("The sources don't matter to a model's shape.")
    return load_sweep(f"paper/{name}", ["data.sources=[text.txt]"], folder)


def totals(sweep: Sweep, **chosen: str) -> dict[tuple[str, str, str], int]:
    """Parameters by mixer, stack and routing of the cells that have the chosen values."""
    found = {}
    for cell in sweep.cells:
        config, model = cell.config, cell.config.model
        if chosen.get("size", config.size) == config.size:
            key = (model.mixer.name, model.stack, model.routing.kind)
            found[key] = count_parameters(model, config.data.vocab_size).total
    return found


def test_the_main_table_holds_the_published_models(tmp_path: Path) -> None:
    sweep = preset("main_table", tmp_path)
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


def test_the_routing_sweep_holds_the_published_hosts(tmp_path: Path) -> None:
    found = totals(preset("routing", tmp_path))
    assert found["gated_deltanet", "hybrid", "none"] == 290_261_088
    assert found["gated_deltanet", "hybrid", "clvr"] == 297_601_120
    assert found["gated_deltanet", "hybrid", "cler_h"] == 297_601_120
    assert found["gated_deltanet", "hybrid", "attention_residuals"] == 290_261_088 + 40_960
    assert found["deltanet", "hybrid", "none"] == 276_458_240
    assert found["deltanet", "hybrid", "clvr"] == 283_798_272
    assert found["deltanet", "hybrid", "cler"] == 276_458_240 + 14


def test_the_larger_sweep_holds_the_published_models(tmp_path: Path) -> None:
    sweep = preset("larger", tmp_path)
    at_1p3b = totals(sweep, size="1p3b")
    assert at_1p3b["deltanet", "hybrid", "none"] == 1_222_086_656
    assert at_1p3b["deltanet", "pure", "none"] == 1_188_729_856
    assert at_1p3b["gated_deltanet", "hybrid", "none"] == 1_231_261_184
    assert at_1p3b["gated_deltanet", "hybrid", "clvr"] == 1_231_261_184 + 33_554_432
    assert totals(sweep, size="3b") == {("deltanet", "hybrid", "none"): 3_072_726_784}


def test_the_context_sweep_holds_the_published_models(tmp_path: Path) -> None:
    sweep = preset("context", tmp_path)
    assert totals(sweep) == {
        ("softmax", "pure", "none"): 18_550_016,
        ("gated_deltanet", "hybrid", "none"): 20_155_968,
        ("gated_deltanet", "pure", "none"): 20_762_336,
    }
    assert sorted({cell.config.seq_len for cell in sweep.cells}) == [2**n for n in range(10, 17)]
    assert {cell.config.windows_per_step * cell.config.seq_len for cell in sweep.cells} == {2**22}
    assert all(cell.config.model.recompute for cell in sweep.cells)


def test_the_learning_rate_sweep_holds_the_published_points(tmp_path: Path) -> None:
    cells = preset("lr_ablation", tmp_path).cells
    assert len(cells) == 3 * (7 + 6)
    for cell in cells:
        optimizer = cell.config.optimizer
        if optimizer.name == "muon" and cell.config.model.mixer.name == "softmax":
            assert optimizer.adam_lr == pytest.approx(4.1667 * optimizer.lr, rel=1e-4)


def test_gated_rules_start_as_published(tmp_path: Path) -> None:
    for cell in preset("main_table", tmp_path).cells:
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
