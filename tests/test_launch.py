"""The launcher: bad settings end in one line, runs write what they promise and resume where they stopped."""

import json
import math
import os
import re
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ep_plugin.adapters.huggingface_dispatchers import Dispatchers
from ep_plugin.config import EPConfig
from ep_plugin.launch import main
from ep_plugin.metrics import MetricsLog, StepMetrics, human_bytes, moved
from ep_plugin.topology import layout
from ep_plugin.train.checkpoint import Header, check_resume
from ep_plugin.train.checks import check_machine, check_settings
from ep_plugin.train.compare import CheckFailed, Difference, enforce
from ep_plugin.train.compose import compose_launch
from ep_plugin.train.loop import Curve, learning_rate
from ep_plugin.train.model import check_weights
from ep_plugin.train.plots import plot
from ep_plugin.train.report import sparkline, summary, table
from ep_plugin.train.routes import expert_load, flipped_routes
from ep_plugin.train.settings import CheckConfig, DataConfig, TrainerConfig
from ep_plugin.train.text import Corpus, batch, corpus_files, read_corpus, unigram_entropy
from tests import launched

TINY = [
    "model.hidden_size=32",
    "model.expert_width=16",
    "model.num_layers=2",
    "trainer.seq_len=32",
    "data.max_bytes=200000",
]


def config_of(*overrides):
    return compose_launch(overrides).config


# --- bad settings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "world", "parts"),
    [
        (["model.num_experts=6", "model.top_k=2", "topology.ep=4"], 4, ["num_experts=6", "4", "[1, 2, 3, 6]"]),
        (["topology.ep=8"], 4, ["topology.ep=8", "world of 4 processes", "nproc=8"]),
        (["topology.ep=3"], 4, ["3", "world_size=4", "1, 2, 4"]),
        (["topology.ep=0"], 4, ["topology.ep=0", "at least 1"]),
        (["topology.tp=2"], 4, ["topology.tp=2", "must be 1 here"]),
        (["ep.dispatcher=rowise"], 4, ["'rowise'", "did you mean 'rowwise'?"]),
        (["model.top_k=17", "model.num_experts=16"], 4, ["top_k=17", "num_experts=16"]),
        (["ep=local"], 4, ["topology.ep=4", "ep=local keeps every expert"]),
        (["ep=none"], 4, ["topology.ep=4", "ep=none keeps every expert"]),
        (["ep.weight_at=input"], 4, ["weight_at='input'", "use 'hidden'"]),
        (["ep.weight_at=source"], 4, ["weight_at='source'", "form='route'"]),
        (["ep.capacity.factor=0"], 4, ["capacity.factor=0", "positive"]),
        (["trainer.batch_size=6"], 4, ["trainer.batch_size=6", "4 data-parallel ranks", "8 would"]),
        (["trainer.seq_len=1024"], 4, ["trainer.seq_len=1024", "model.max_length=512"]),
        (["trainer.steps=0"], 4, ["trainer.steps=0", "at least 1"]),
        (["trainer.lr=nan"], 4, ["trainer.lr=nan", "at least 0"]),
        (["trainer.clip_norm=0"], 4, ["trainer.clip_norm=0", "null"]),
        (["trainer.dtype=float23"], 4, ["'float23'", "did you mean 'float32'?"]),
        (["model.architecture=olmo"], 4, ["'olmo'", "did you mean 'olmoe'?"]),
        (["model.num_heads=3"], 4, ["model.hidden_size=128", "model.num_heads=3"]),
        (["model.vocab_size=100"], 4, ["model.vocab_size=100", "256"]),
        (["data.path=/nowhere"], 4, ["'/nowhere'", "neither a file nor a folder"]),
        (["data.suffix=.nothing"], 4, ["no file that ends in data.suffix='.nothing'"]),
        (["data.max_bytes=10"], 4, ["10 bytes", "trainer.seq_len=128"]),
        (["trainer=hf", "trainer.batch_size=6", "trainer.hf.microbatches=4"], 2, ["= 8; 8 would"]),
        (["trainer=hf", "trainer.hf.text=tokenizer"], 2, ["trainer.hf.weights, which is null"]),
        (["trainer=hf", "trainer.dtype=bfloat16", "trainer.hf.autocast=true"], 2, ["float32 weights"]),
        (["trainer=hf", "ep=none", "topology.ep=1", "trainer.hf.shard_optimizer=true"], 2, ["not with ep=none"]),
        (["trainer.resume=/nowhere"], 4, ["trainer.resume='/nowhere'", "not a checkpoint"]),
        (["cluster.nodes=2"], 4, ["cluster.nodes=2", "cluster=slurm"]),
    ],
)
def test_a_bad_setting_is_refused_with_its_value(overrides, world, parts):
    """Catches a setting that only fails once processes wait for each other, or an error that does not say what would
    do.
    """
    with pytest.raises(ValueError) as error:
        check_settings(config_of(*overrides), world)
    for part in parts:
        assert part in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has what is asked for")
@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["ep.heap=nvshmem"], "ep.heap='nvshmem' needs a CUDA device"),
        (["ep.heap=torch"], "ep.heap='torch' needs a CUDA device"),
        (["trainer.device=cuda"], "torch sees no CUDA device"),
        (["cluster.backend=nccl"], "needs CUDA devices"),
    ],
)
def test_what_the_machine_lacks_is_refused(overrides, part):
    """Catches a silent fallback from what was asked for to what is there."""
    with pytest.raises(ValueError, match=part):
        check_machine(config_of(*overrides))


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("+model.extra.clip_qvk=3", "did you mean clip_qkv?"),
        ("+model.extra.hidden_size=3", "set by the other settings"),
    ],
)
def test_an_unknown_model_setting_is_refused(override, part):
    """Catches transformers' configs, which store any name without a word."""
    with pytest.raises(ValueError, match=part.replace("?", r"\?")):
        check_machine(config_of(override))


def test_one_process_that_needs_more_says_how_to_start_them(capsys):
    """Catches a traceback, several lines, or a zero exit code where the settings are wrong."""
    with pytest.raises(SystemExit) as stopped:
        main(["experiment=demo"])
    assert stopped.value.code == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1 and not printed.out
    assert "variants.ep4: topology.ep=4 is larger than the world of 1 process; start 4 (nproc=4" in printed.err


def test_a_rank_that_alone_finds_a_fault_says_so(capsys, monkeypatch):
    """Catches a rank whose own disk or device is at fault and that leaves without a word."""
    waited = []
    monkeypatch.setattr("time.sleep", waited.append)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(SystemExit) as stopped:
        main(["data.path=/nowhere"])
    assert stopped.value.code == 2 and waited
    assert "'/nowhere' is neither a file nor a folder" in capsys.readouterr().err


def test_dry_run_shows_settings_and_topology(capsys):
    """Catches a printed configuration that is not the resolved one, and a topology for another world."""
    main(["experiment=demo", "nproc=4", "dry_run=true"])
    shown = capsys.readouterr().out
    assert "dispatcher: rowwise" in shown and "lr: " in shown
    assert "Topology of ep2_dp2\n4 ranks = PP 1 × (TP 1 · CP 1 · DP 4) = PP 1 × (ETP 1 · EP_MP 2 · EP_DP 2)" in shown


def test_help_lists_the_groups(capsys):
    """Catches a help that forgets a group or shows the schemas as choices."""
    main(["--help"])
    shown = capsys.readouterr().out
    assert re.search(r"experiment: .*\bdemo\b", shown) and "rowwise_route" in shown and "schema" not in shown


# --- real processes --------------------------------------------------------------------------------------------------


def launch(processes, folder, *overrides):
    """Run the launcher under torchrun with output in ``folder``: (exit code, stdout, stderr); nothing may be left
    running.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    mark = f"hydra.run.dir={folder}"
    done = subprocess.run(
        [*command, "-m", "ep_plugin.launch", mark, *overrides],
        cwd=folder.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert not left_running(mark), done.stderr
    return done.returncode, done.stdout, done.stderr


def left_running(mark, patience_s=5.0):
    """Processes whose command line holds ``mark``, once they had ``patience_s`` to go."""
    end = time.monotonic() + patience_s
    while True:
        found = [p for p in Path("/proc").glob("[0-9]*/cmdline") if mark in read_quietly(p)]
        if not found or time.monotonic() > end:
            return found
        time.sleep(0.1)


def read_quietly(path):
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:  # it has just ended
        return ""


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("ep.dispatchr=block", "did you mean ep.dispatcher?"),
        pytest.param(
            "ep.heap=nvshmem",
            "needs a CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has what is asked for"),
        ),
    ],
)
def test_a_bad_setting_ends_all_processes_with_one_line(tmp_path, override, expected):
    """Catches one line per rank, a traceback of ours, ranks that wait for those that left, or output made before the
    check.
    """
    code, out, err = launch(2, tmp_path / "out", override)
    assert code != 0
    ours = [line for line in err.splitlines() if line.startswith("ep-plugin:")]
    assert len(ours) == 1 and expected in ours[0]
    assert "ep_plugin/launch.py" not in err and not out.strip()
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_torchruns_summary_ends_with_the_error(tmp_path, monkeypatch):
    """Catches an error that only stands above torchrun's own traceback, where nobody looks."""
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    with pytest.raises(SystemExit):
        main(["ep.form=dedupe"])
    assert "form='dedupe' is not one of dedup, route" in json.loads(file.read_text())["message"]


def test_training_resumes_where_it_stopped(pool, tmp_path):
    """Catches optimizer state, experts or batches that a checkpoint loses or gives to another rank, or that only the
    degrees can read that wrote them."""
    common = [*TINY, "trainer.batch_size=4", "trainer.steps=6"]
    launched.launch(pool, 2, f"hydra.run.dir={tmp_path}/whole", *common, "topology.ep=2", "trainer.checkpoint_every=3")
    checkpoint = tmp_path / "whole" / "checkpoints" / "train_tiny" / "step_000003"
    launched.launch(pool, 2, f"hydra.run.dir={tmp_path}/rest", *common, "topology.ep=1", f"trainer.resume={checkpoint}")

    whole, rest = losses(tmp_path / "whole"), losses(tmp_path / "rest")
    assert list(whole) == [1, 2, 3, 4, 5, 6] and list(rest) == [4, 5, 6]
    assert all(rest[step] == pytest.approx(whole[step], abs=1e-5) for step in rest)
    assert len({round(loss, 6) for loss in whole.values()}) == 6
    assert (tmp_path / "whole" / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "whole" / ".hydra" / "config.yaml").is_file()

    with pytest.raises(ValueError, match="was written with trainer=transformers; this run has trainer=megatron"):
        check_resume(str(checkpoint), Header(step=6, world_size=2, ep=2, patch_experts=True, trainer="megatron"))
    with pytest.raises(ValueError, match="has done 3 steps already; trainer.steps=3 must be more"):
        check_resume(str(checkpoint), Header(step=3, world_size=2, ep=2, patch_experts=True))
    with pytest.raises(ValueError, match=r"written with model\.hidden_size=32, and this run has model\.hidden_size=64"):
        check_settings(compose_launch([*common, "model.hidden_size=64", f"trainer.resume={checkpoint}"]).config, 2)

    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert model.model.layers[0].mlp.experts.down_proj.shape == (16, 32, 16)


@pytest.mark.slow
def test_transformers_trainer(pool, tmp_path):
    """Catches a run of trainer=hf that its checkpoint does not carry on with other degrees, and weights of another
    model than the one described."""
    small = [*TINY, "trainer.batch_size=4", "trainer.steps=4"]
    hf = [*small, "trainer=hf", "trainer.hf.microbatches=2"]
    launched.launch(pool, 2, f"hydra.run.dir={tmp_path}/hf", *hf, "topology.ep=2", "trainer.checkpoint_every=2")
    checkpoint = tmp_path / "hf" / "checkpoints" / "train_tiny" / "checkpoint-2"
    sharded = ["topology.ep=1", "trainer.hf.shard_optimizer=true"]
    launched.launch(pool, 2, f"hydra.run.dir={tmp_path}/rest", *hf, *sharded, f"trainer.resume={checkpoint}")
    whole, rest = losses(tmp_path / "hf"), losses(tmp_path / "rest")
    assert list(whole) == [1, 2, 3, 4] and list(rest) == [3, 4]
    assert all(rest[step] == pytest.approx(whole[step], abs=1e-4) for step in rest)

    weights = [*hf, "topology.ep=2", f"trainer.hf.weights={checkpoint}", "trainer.steps=1", "seed=1"]
    launched.launch(pool, 2, f"hydra.run.dir={tmp_path}/again", *weights)
    with pytest.raises(ValueError, match=r"has num_layers=2, but model\.num_layers=3"):
        check_weights(config_of(*small, "model.num_layers=3").model, str(checkpoint))


@pytest.mark.slow
def test_ep_trains_like_no_ep_and_a_missed_check_fails(tmp_path):
    """Catches gradients that the dispatchers scale or lose, an optimizer step on them, and a failed check that exits
    with 0.
    """
    variants = [
        "experiment=dispatchers",
        *TINY,
        "trainer.batch_size=4",
        "trainer.steps=4",
        "check.loss_difference=1e-5",
    ]
    code, out, err = launch(2, tmp_path / "out", *variants, "check.below_unigram=true", "trainer.checkpoint=false")
    assert code != 0
    assert "ep-plugin: FAILED: the final loss of no_ep is" in err and "not below the text's unigram entropy" in err
    runs = metrics(tmp_path / "out")
    assert set(runs) == {"no_ep", "block", "rowwise", "rowwise_route"}
    for name in ("block", "rowwise", "rowwise_route"):
        for step, row in runs[name].items():
            assert row["loss"] == pytest.approx(runs["no_ep"][step]["loss"], abs=1e-5)
            assert row["grad_norm"] == pytest.approx(runs["no_ep"][step]["grad_norm"], rel=1e-4)
            assert row["expert_load"] == runs["no_ep"][step]["expert_load"]
            assert row["bytes_moved"] > 0 and row["drop_rate"] == 0
    assert runs["rowwise"][4]["bytes_moved"] < runs["rowwise_route"][4]["bytes_moved"]
    assert "routes flipped" in out and "expert params/rank" in out


def metrics(folder):
    runs = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        runs.setdefault(row["run"], {})[row["step"]] = row
    return runs


def losses(folder):
    (run,) = metrics(folder).values()
    return {step: row["loss"] for step, row in run.items()}


@pytest.mark.skipif(find_spec("submitit") is not None, reason="it is installed")
def test_slurm_without_its_launcher_says_what_to_install():
    """Catches Hydra's message about a missing file where an extra is missing."""
    with pytest.raises(
        ValueError, match=r"cluster=slurm needs hydra-submitit-launcher.*pip install 'ep_plugin\[slurm\]'"
    ):
        compose_launch(["cluster=slurm"])


@pytest.mark.slow
@pytest.mark.skipif(find_spec("submitit") is None, reason="needs the extra slurm")
def test_a_job_of_the_submitit_launcher(tmp_path):
    """Catches tasks that do not find each other, or an output folder for each; Slurm is played by submitit's local
    executor.
    """
    job = ["cluster=slurm", "hydra/launcher=submitit_local", "hydra.launcher.gpus_per_node=0", "nproc=2"]
    command = [sys.executable, "-m", "ep_plugin.launch", *job, f"hydra.sweep.dir={tmp_path}/out", "topology.ep=2"]
    done = subprocess.run(
        [*command, *TINY, "trainer.steps=2"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert list(losses(tmp_path / "out" / "0")) == [1, 2]
    checkpoint = tmp_path / "out" / "0" / "checkpoints" / "train_tiny" / "step_000002"
    assert (checkpoint / "optimizer" / ".metadata").is_file()


# --- parts -----------------------------------------------------------------------------------------------------------


def test_unigram_entropy():
    """Catches bits for nats, counts of absent bytes, or a mean over the wrong axis."""
    assert unigram_entropy(np.zeros(100, np.uint8)) == 0
    assert unigram_entropy(np.arange(256, dtype=np.uint8)) == pytest.approx(math.log(256))
    assert unigram_entropy(np.array([1, 1, 1, 7], np.uint8)) == pytest.approx(
        0.75 * math.log(4 / 3) + 0.25 * math.log(4)
    )


def test_batches_depend_on_seed_and_step_alone():
    """Catches batches that change with the world size, repeat from step to step, or overlap between ranks."""
    corpus = Corpus(np.random.default_rng(0).integers(256, size=5000).astype(np.uint8), 1, "")
    size = {"batch_size": 8, "seq_len": 16}
    whole = batch(corpus, seed=3, step=5, **size)
    assert whole.shape == (8, 16) and whole.dtype == np.int64
    for world in (2, 4):
        parts = [batch(corpus, seed=3, step=5, rank=rank, world=world, **size) for rank in range(world)]
        assert np.array_equal(np.concatenate(parts), whole)
    assert not np.array_equal(batch(corpus, seed=3, step=6, **size), whole)
    assert not np.array_equal(batch(corpus, seed=4, step=5, **size), whole)
    text = corpus.tokens.tobytes()
    assert all(row.astype(np.uint8).tobytes() in text for row in whole)


def test_a_text_as_long_as_a_sequence_can_be_read_to_its_end():
    """Catches an off-by-one at the end of the text."""
    corpus = Corpus(np.arange(16, dtype=np.uint8), 1, "")
    assert np.array_equal(batch(corpus, seed=0, step=0, batch_size=1, seq_len=16)[0], np.arange(16))


def test_corpus_of_a_folder_a_file_and_the_library(tmp_path):
    """Catches an order that depends on the file system, other files' suffixes, and installed packages taken for the
    library.
    """
    (tmp_path / "b").mkdir()
    for name, text in (("b/1.txt", "three"), ("a.txt", "one"), ("a.md", "none"), ("b.txt", "two")):
        (tmp_path / name).write_text(text)
    folder = read_corpus(DataConfig(path=str(tmp_path), suffix=".txt"))
    assert folder.tokens.tobytes() == b"onetwothree" and folder.files == 3
    assert read_corpus(DataConfig(str(tmp_path), ".txt", max_bytes=4)).tokens.tobytes() == b"onet"
    assert read_corpus(DataConfig(path=str(tmp_path / "a.md"))).tokens.tobytes() == b"none"
    _, library = corpus_files(DataConfig())
    assert len(library) > 100
    assert not [file for file in library if "site-packages" in file.parts or "test" in file.parts]


def test_flipped_routes_ignore_the_order_of_a_token():
    """Catches a count of reordered routes, or of tokens in place of routes."""
    a = torch.tensor([[[0, 1], [2, 3], [4, 5]]])
    b = torch.tensor([[[1, 0], [2, 9], [8, 9]]])
    assert flipped_routes(a, a) == 0
    assert flipped_routes(a, b) == 3


def test_expert_load_counts_per_layer():
    """Catches layers added up, or experts without routes left out."""
    routes = torch.tensor([[[0, 1], [1, 2]], [[3, 3], [3, 0]]], dtype=torch.int16)
    assert expert_load(routes, 5).tolist() == [[1, 2, 1, 0, 0], [1, 0, 0, 3, 0]]


def test_learning_rate_warms_up_from_any_step():
    """Catches a schedule that starts again when a run resumes, or a first step at zero."""
    config = TrainerConfig(lr=1.0, warmup=4)
    assert [learning_rate(config, step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert learning_rate(TrainerConfig(lr=1.0, warmup=0), 0) == 1.0


def curve(name, values, **numbers):
    steps = [
        StepMetrics(
            run=name,
            step=i + 1,
            loss=value,
            lr=0.1,
            grad_norm=1.0,
            **{
                "seconds": 2.0,
                "tokens_per_s": 50.0,
                "drop_rate": 0.0,
                "expert_load": 1.5,
                "bytes_moved": 2e6,
                **numbers,
            },
        )
        for i, value in enumerate(values)
    ]
    return Curve(name, layout(4, ep=2), "rowwise", 100, 40, steps, load=torch.ones(2, 4))


def test_checks_compare_with_the_first_variant_and_the_entropy():
    """Catches a NaN that passes as agreement, and a check that is never made."""
    curves = [curve("a", [3.0, 2.0]), curve("b", [3.0, 2.0])]
    check = CheckConfig(loss_difference=1e-3, below_unigram=True)
    enforce(check, curves, [Difference("b", 1e-3, 1e-3, 0, 1)], entropy=2.5)
    for bad in (2e-3, math.nan):
        with pytest.raises(CheckFailed, match="the loss of b differs by .* from that of a"):
            enforce(check, curves, [Difference("b", bad, 0.0, 0, 1)], entropy=2.5)
    for bad in (-6e-3, math.nan):
        with pytest.raises(CheckFailed, match="mean of the last 100 losses of b differs by"):
            enforce(CheckConfig(last_losses=5e-3), curves, [Difference("b", 0.0, bad, 0, 1)], entropy=2.5)
    with pytest.raises(CheckFailed, match="final loss of a is 2.0000, not below"):
        enforce(check, curves, [], entropy=2.0)
    enforce(CheckConfig(), curves, [Difference("b", 5.0, 5.0, 0, 1)], entropy=0.0)


def test_metrics_are_one_object_a_line(tmp_path):
    """Catches a log that is only whole once the run has ended."""
    log = MetricsLog(tmp_path / "m.jsonl")
    for step in curve("a", [3.0, 2.0]).steps:
        log.write(step)
        assert json.loads((tmp_path / "m.jsonl").read_text().splitlines()[-1])["step"] == step.step
    log.close()


def test_bytes_that_a_dispatcher_does_not_count_are_not_zero(tmp_path):
    """Catches a false 0 where counts stay on the device, and NaN in a file of JSON."""
    dispatchers = Dispatchers(EPConfig(), None)
    counts, not_counted = (SimpleNamespace(stats=lambda s=s: s) for s in ({"bytes_sent": 7}, {"slots_peak": 3}))
    dispatchers._made = {0: counts}
    before = dispatchers.bytes_sent()
    dispatchers._made[1] = not_counted
    assert (before, dispatchers.bytes_sent()) == (7, None)
    assert moved(3, before) == 4 and math.isnan(moved(before, None)) and math.isnan(moved(None, None))
    silent = curve("gpu", [3.0], bytes_moved=moved(before, dispatchers.bytes_sent()))
    assert silent.steps[0].line(1).endswith("moved -") and summary([silent]).endswith(" -")
    log = MetricsLog(tmp_path / "m.jsonl")
    log.write(silent.steps[0])
    log.close()
    line = (tmp_path / "m.jsonl").read_text()
    assert '"bytes_moved": null' in line and json.loads(line)["loss"] == 3.0


def test_the_report_shows_what_was_measured(tmp_path):
    """Catches columns that slip, and means of the wrong numbers."""
    shown = summary([curve("ep2", [3.0, 2.0])])
    assert shown.splitlines()[-1].split() == [
        "ep2",
        "rowwise",
        "2",
        "2",
        "4",
        "100",
        "40",
        "50",
        "2.0000",
        "0.00%",
        "2.0",
        "MB",
    ]
    assert table([["a", "b"], ["1", "22"]]) == "a   b\n-----\n1  22"
    assert sparkline([0, 1, 2, 7]) == "▁▂▃█" and sparkline([math.nan, 1.0]) == " ▁"
    assert len(sparkline(list(range(100)), width=10)) == 10
    assert [human_bytes(n) for n in (0, 999, 1500, 2e9)] == ["0 B", "999 B", "1.5 kB", "2.0 GB"]
    plot([curve("a", [3.0, 2.0]), curve("b", [3.0, 2.1])], 2.5, tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
