"""From YAML and the command line to cells; and one clear sentence for everything that is wrong."""

import json
import textwrap

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from models.accounting import count_parameters
from orchestrator.compose import load_sweep
from orchestrator.compose.conf_folder import CONF_FOLDER, conf_names
from orchestrator.config import trial_from_dict
from orchestrator.errors import ConfigError

SMALL = """
name: small
base:
  size: nano
  data: sotu
  budget.tokens: 5120
  batch.tokens: 512
axes:
  model.mixer: [softmax, deltanet, gated_deltanet]
  optimizer: [adamw, muon]
  optimizer.lr:
    - {when: {optimizer: adamw}, values: [1e-3, 3e-3]}
    - {when: {optimizer: muon}, values: [3e-4]}
seeds: [0, 1]
"""


@pytest.fixture
def load(tmp_path):
    def run(text=SMALL, *overrides):
        (tmp_path / "sweep.yaml").write_text(textwrap.dedent(text), encoding="utf-8")
        return load_sweep("sweep.yaml", list(overrides), tmp_path)

    return run


def rows(sweep):
    return [
        (c.config.model.mixer.name, c.config.optimizer.name, c.config.optimizer.lr)
        for c in sweep.cells
    ]


def test_the_cells_are_those_counted_by_hand(load):
    sweep = load()
    assert rows(sweep) == [
        (mixer, *choice)
        for mixer in ("softmax", "deltanet", "gated_deltanet")
        for choice in (("adamw", 1e-3), ("adamw", 3e-3), ("muon", 3e-4))
    ]
    assert len({cell.cell_id for cell in sweep.cells}) == 9
    assert len({cell.arm_id for cell in sweep.cells}) == 6
    assert sweep.spec.seeds == [0, 1]


def test_a_list_on_the_command_line_replaces_an_axis_and_drops_what_it_empties(load):
    sweep = load(SMALL, "optimizer=adamw", "seeds=range(3)", "model.mixer=deltanet,softmax")
    assert rows(sweep) == [
        (mixer, "adamw", lr) for mixer in ("deltanet", "softmax") for lr in (1e-3, 3e-3)
    ]
    assert sweep.spec.seeds == [0, 1, 2]
    assert any("optimizer: muon" in note for note in sweep.notes)


def test_a_list_on_the_command_line_adds_an_axis(load):
    sweep = load(SMALL, "optimizer=adamw", "optimizer.weight_decay=0.0,0.1")
    assert len(sweep.cells) == 12


def test_a_single_value_changes_the_base(load):
    sweep = load(SMALL, "budget.tokens=10_240", "name=other")
    assert {cell.config.budget.tokens for cell in sweep.cells} == {10_240}
    assert sweep.spec.name == "other"


def test_an_option_of_one_mixer_is_read_by_that_mixer_alone(load):
    sweep = load(SMALL, "model.mixer.dt_init=ones")
    found = {
        c.config.model.mixer.name: getattr(c.config.model.mixer, "dt_init", None)
        for c in sweep.cells
    }
    assert found == {"softmax": None, "deltanet": None, "gated_deltanet": "ones"}


def test_a_base_value_that_an_override_left_without_a_reader_is_said(load):
    text = SMALL.replace("  size: nano", "  size: nano\n  optimizer.adam_lr: 1e-2")
    sweep = load(text, "optimizer=adamw")
    assert "no cell is left that reads optimizer.adam_lr" in sweep.notes
    with pytest.raises(ConfigError, match=r"optimizer\.adam_lr is set, but no cell"):
        load(SMALL, "optimizer=adamw", "optimizer.adam_lr=1e-2")


def test_a_value_that_is_the_default_changes_no_id(load):
    plain = [cell.cell_id for cell in load().cells]
    assert [cell.cell_id for cell in load(SMALL, "clip_norm=1.0").cells] == plain
    assert [cell.cell_id for cell in load(SMALL, "device=cpu", "lanes.loss.cpus=1").cells] == plain


def test_keys_without_effect_in_a_cell_are_no_part_of_it(load):
    assert load(SMALL, "model.softmax_every=2").cells == load().cells


def test_an_axis_without_effect_makes_no_second_cell(load):
    sweep = load(SMALL, "model.softmax_every=2,3")
    assert len(sweep.cells) == 9
    assert any("equal to another" in note for note in sweep.notes)


def test_matched_cells_have_the_parameters_of_the_softmax_stack(load):
    counts = {}
    for cell in load().cells:
        model = cell.config.model
        counts[model.mixer.name] = count_parameters(model, 1).non_embedding, model.ffn_dim
    target, width = counts.pop("softmax")
    assert width == 176
    for count, width in counts.values():
        assert abs(count / target - 1) <= 0.01
        assert width < 176
        assert width % 4 == 0


def test_what_a_cell_holds_survives_json_and_needs_no_hydra(load):
    for cell in load().cells:
        assert trial_from_dict(json.loads(json.dumps(cell.values))) == cell.config


def test_interpolations_and_resolvers_are_resolved_in_each_cell(load):
    OmegaConf.register_new_resolver("test_double", lambda x: 2 * x, replace=True)
    text = SMALL.replace(
        "  batch.tokens: 512",
        "  batch.tokens: 512\n  optimizer.adam_lr: ${test_double:${optimizer.lr}}",
    )
    for cell in load(text).cells:
        if cell.config.optimizer.name == "muon":
            assert cell.config.optimizer.adam_lr == 2 * cell.config.optimizer.lr


@pytest.mark.parametrize("value", ["${nowhere.at_all}", "${hydra:job.name}"])
def test_an_interpolation_that_leads_nowhere_names_key_and_cell(load, value):
    text = SMALL.replace("  batch.tokens: 512", f"  batch.tokens: 512\n  clip_norm: {value}")
    with pytest.raises(ConfigError, match=r"clip_norm.*in the cell .*model\.mixer=softmax"):
        load(text)


def test_a_mandatory_value_that_is_missing_names_key_and_cell(load):
    text = SMALL.replace("  batch.tokens: 512", "  batch.tokens: ???")
    with pytest.raises(ConfigError, match=r"batch\.tokens has no value.*in the cell"):
        load(text)


def test_files_without_sources_are_refused(load):
    with pytest.raises(ConfigError, match=r"data\.sources is empty"):
        load(SMALL.replace("data: sotu", "data: files"))


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["model.mixr=softmax"], r"unknown key model\.mixr; nearest: model\.mixer"),
        (["optimizer=admw"], "optimizer=admw: no such option; nearest: adamw"),
        (["size=nanno"], "size=nanno: no such option"),
        (["budget.tokens=0"], r"budget\.tokens=0 must be at least 1"),
        (["budget.tokens=many"], r"budget\.tokens='many'.*Integer"),
        (["budget.tokens=1.5"], r"budget\.tokens=1\.5"),
        (["seeds=0,1,0"], "seeds holds 0 2 times"),
        (["seeds=[]"], "seeds is empty"),
        (["seeds=-1"], "seeds holds -1"),
        (["seq_len=100"], r"batch\.tokens=512 must be a multiple of seq_len=100"),
        (["model.ffn_dim=128"], r"model\.ffn_dim is given although match: params"),
        (["match=parms"], "match='parms' must be one of params"),
        (["device=tpu"], "device='tpu' must be one of auto"),
        (["lanes.loss.gpu=1"], r"unknown key .*gpu; nearest: lanes\.loss\.gpus"),
        (["optimizer.lr=shuffle(1,2)"], "must be discrete|shuffle"),
        (["optimizer.lr=interval(0,1)"], "must be discrete"),
        (["~optimizer.lr"], "keys are neither added nor removed"),
        (["optimizer.lr"], "optimizer.lr"),
        (["optimizer.lr=1", "optimizer.lr=2"], r"optimizer\.lr is given 2 times"),
        (["model=big"], "model holds keys of its own"),
        (["name=a/b"], "name='a/b' must be letters"),
        (["schedule.decay_fraction=0.99"], "exceed the run"),
        (["seq_len=256,512"], "purpose: compare needs equal seq_len"),
        (["budget.tokens=5120,10240"], r"purpose: compare needs equal budget\.tokens"),
        (["lanes.loss.cpus=0"], r"lanes\.loss\.cpus=0"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else "",
)
def test_a_bad_override_is_one_clear_sentence(load, overrides, sentence):
    with pytest.raises(ConfigError, match=sentence) as caught:
        load(SMALL, *overrides)
    assert "\n" not in str(caught.value).strip()


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        ("base:", "bse:", "unknown key bse; nearest: base"),
        ("budget.tokens", "budget.token", r"base: unknown key budget\.token; nearest: budget"),
        ("optimizer: muon}", "optimizer: mun}", "no cell meets the condition"),
        ("seeds: [0, 1]", "seeds: zero", "seeds"),
        ("seeds: [0, 1]", "exclude: [{model.mixer: kimi_delta}]", "exclude: no cell meets"),
        (
            "  size: nano",
            "  size: nano\n  model.mixer.variant: full",
            "no cell of this sweep reads it",
        ),
        ("axes:", "axes: [", "not valid YAML"),
        ("name: small", "", "name"),
    ],
    ids=["key", "base key", "condition", "seeds", "exclude", "unread", "yaml", "no name"],
)
def test_a_bad_file_is_one_clear_sentence(load, before, after, sentence):
    with pytest.raises(ConfigError, match=sentence):
        load(SMALL.replace(before, after, 1))


def test_unequal_cells_are_allowed_where_nothing_is_compared_across_them(load):
    sweep = load(SMALL + "compare_within: [seq_len]\n", "seq_len=256,512")
    assert len(sweep.cells) == 18


@pytest.mark.parametrize("match", ["params", "depth"])
def test_depths_are_compared_only_where_the_rule_says_so(load, match):
    deeper = ["model.num_layers=3,6", f"match={match}"]
    with pytest.raises(ConfigError, match=rf"match: {match} needs equal model.num_layers"):
        load(SMALL, *deeper)
    assert len(load(SMALL + "compare_within: [model.num_layers]\n", *deeper).cells) == 18
    assert len(load(SMALL, "model.num_layers=3,6", "match=paper").cells) == 18


def test_what_differs_along_with_a_separating_axis_is_allowed(load):
    sizes = SMALL + "compare_within: [size]\n"
    assert len(load(sizes, "size=nano,10m", "seq_len=256").cells) == 18
    with pytest.raises(ConfigError, match="needs equal seq_len"):
        load(sizes, "size=nano,10m", "seq_len=256,512")


def test_matching_by_depth_leaves_the_width_of_the_size(load):
    widths = {cell.config.model.ffn_dim for cell in load(SMALL, "match=depth").cells}
    assert widths == {176}


def test_an_unknown_name_lists_the_nearest(tmp_path):
    with pytest.raises(ConfigError, match="nearest: quickstart"):
        load_sweep("quikstart", [], tmp_path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"there is no file .*mine\.yaml"):
        load_sweep("mine.yaml", [], tmp_path)


@pytest.mark.parametrize("name", conf_names())
def test_every_shipped_sweep_composes(name, tmp_path):
    assert load_sweep(name, [], tmp_path).cells


def test_a_hydra_that_was_initialised_before_is_left_as_it_was(load):
    with initialize_config_dir(str(CONF_FOLDER), version_base="1.3"):
        load()
        assert GlobalHydra.instance().is_initialized()
        assert compose("quickstart")["name"] == "quickstart"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data_seed=-1", r"data_seed=-1 must be between 0 and 2\*\*64 - 1"),
        ("diverged_above_nats=nan", "diverged_above_nats=nan must be positive"),
        ("diverged_above_nats=inf", "diverged_above_nats is inf: only finite numbers"),
        ("model.norm_eps=inf", r"model\.norm_eps is inf: only finite numbers"),
        ("clip_norm=inf", "clip_norm is inf: only finite numbers"),
    ],
)
def test_numbers_that_no_trial_could_use_are_refused_with_their_cell(load, override, message):
    with pytest.raises(ConfigError, match=rf"{message}.*\(in the cell model\.mixer=softmax"):
        load(SMALL, override)
