"""The documentation: its code runs, its commands parse, its figures are drawn by the code, its words are in it."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ep_plugin import topology
from ep_plugin.bench.__main__ import parse as parse_bench
from ep_plugin.bench.fuzz import parse as parse_fuzz
from ep_plugin.config import EPConfig

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = {page.name: page.read_text() for page in [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]}


def load_hooks() -> Any:
    spec = importlib.util.spec_from_file_location("docs_hooks", DOCS / "hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


hooks = load_hooks()


def blocks(page: str, language: str) -> list[str]:
    """The code blocks of ``page`` in ``language``."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```", PAGES[page], re.DOTALL | re.MULTILINE)
    return [re.sub(rf"^{indent}", "", text, flags=re.MULTILINE) for indent, text in found]


# Code blocks


def run_program(tmp_path: Path, program: str) -> str:
    (tmp_path / "train.py").write_text(program)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    return ran.stdout


@pytest.mark.slow
def test_the_first_program_trains(tmp_path):
    """Fault: a newcomer's first program fails, or the README and the site show different ones."""
    pytest.importorskip("transformers")
    (program,) = (block for block in blocks("index.md", "python") if block.startswith("# train.py"))
    assert program in blocks("README.md", "python")
    printed = run_program(tmp_path, program)
    assert re.findall(r"step (\d)  loss [4-6]\.\d+  norm \d", printed) == ["0", "1", "2", "3", "4"], printed


def execute(source: str, names: dict[str, Any], where: str) -> None:
    exec(compile(source, where, "exec"), names)


def torch_page(rank: int, world: int) -> list[int]:
    names: dict[str, Any] = {"torch": torch}
    with mock.patch.object(dist, "init_process_group"):  # the pool's processes have one
        for number, block in enumerate(blocks("torch.md", "python")):
            execute(block, names, f"torch.md, block {number}")
    readme = next(block for block in blocks("README.md", "python") if "GroupedMLP" in block)
    x = torch.randn(5, 64).bfloat16()
    idx = torch.randint(0, 16, (5, 2))
    also = {"torch": torch, "x": x, "topk_idx": idx, "topk_weight": torch.rand(5, 2), "ep_group": dist.group.WORLD}
    execute(readme, also, "README.md")
    return [*names["out"].shape, *also["out"].shape]


def test_the_blocks_of_plain_torch_run(pool):
    """Fault: an example with a name, argument or shape that is no longer right."""
    assert pool.run(torch_page, 2) == [[10, 64, 5, 64], [11, 64, 5, 64]]


def megatron_page(rank: int, world: int) -> list[str]:
    from tests import megatron_models as mm

    mm.use_version(None)
    from ep_plugin.adapters.megatron import plug_spec, use_dispatcher

    ran = []
    with mm.parallel(ep=world):
        for page in ("README.md", "megatron.md"):
            for block in blocks(page, "python"):
                if "adapters.megatron" not in block and "use_dispatcher" not in block:
                    continue
                cfg = mm.config(dict(ep=world))
                hook: list[Any] = []
                model = types.SimpleNamespace(register_pre_wrap_hook=hook.append)
                names: dict[str, Any] = {"model": mm.gpt(cfg), "cfg": types.SimpleNamespace(model=model)}
                names |= {"use_dispatcher": use_dispatcher, "plug_spec": plug_spec, "EPConfig": EPConfig}
                execute(block, names, page)
                for change in hook:
                    change(mm.gpt(cfg))
                ran.append(page)
    return ran


@pytest.mark.slow
def test_the_blocks_of_megatron_run(pool):
    """Fault: as above, for the Megatron adapter."""
    pytest.importorskip("megatron.core")
    for ran in pool.run(megatron_page, 2):
        assert ran.count("README.md") == 1 and ran.count("megatron.md") >= 2


def huggingface_page(rank: int, world: int, folder: str) -> float:
    """The first block of the page: patch, train, save."""
    from torch.nn.parallel import DistributedDataParallel
    from transformers import OlmoeConfig, OlmoeForCausalLM

    os.chdir(folder)
    torch.manual_seed(0)
    config = OlmoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts=8,
        num_experts_per_tok=2,
        pad_token_id=0,
    )
    tokens = torch.randint(1, 64, (1, 8))
    names = {
        "torch": torch,
        "dist": dist,
        "DistributedDataParallel": DistributedDataParallel,
        "model": OlmoeForCausalLM(config),
        "batches": [dict(input_ids=tokens, labels=tokens)] * 2,
    }
    execute(blocks("huggingface.md", "python")[0], names, "huggingface.md, block 0")
    return 0.0


@pytest.mark.slow
def test_the_first_block_of_hugging_face_runs(pool, tmp_path):
    """Fault: as above, for the Hugging Face adapter; a checkpoint that transformers does not load."""
    transformers = pytest.importorskip("transformers")
    pool.run(huggingface_page, 4, str(tmp_path))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint")
    assert loaded.model.layers[0].mlp.experts.gate_up_proj.shape[0] == 8


@pytest.mark.parametrize("page", PAGES)
def test_every_block_compiles_and_imports_what_there_is(page):
    """Fault: an example that imports a name of ours that is gone; a syntax error."""
    for block in blocks(page, "python"):
        if block.lstrip().startswith(">>>"):
            continue
        for node in ast.walk(ast.parse(block, page)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ep_plugin"):
                module = importlib.import_module(str(node.module))
                missing = [alias.name for alias in node.names if not hasattr(module, alias.name)]
                assert not missing, (page, node.module, missing)


# Commands


def commands() -> Iterator[tuple[str, list[str]]]:
    for page in PAGES:
        for line in re.findall(r"^ *(ep-(?:topology|bench|doctor)\b.*)$", PAGES[page], re.MULTILINE):
            yield page, line.partition(" #")[0].replace("...", "").split()


@pytest.mark.parametrize(
    ("page", "words"), list(commands()), ids=lambda v: v if isinstance(v, str) else "-".join(v)[:60]
)
def test_commands_parse(page, words, tmp_path, monkeypatch, capsys):
    """Fault: an option that is no longer there."""
    monkeypatch.chdir(tmp_path)
    program, *rest = words
    try:
        if program == "ep-topology":
            topology.main(rest)
            assert "EP_MP" in capsys.readouterr().out
        elif program == "ep-bench":
            parse_fuzz(rest[1:]) if rest[0] == "fuzz" else parse_bench(rest)
        else:
            assert set(rest) <= {"--json", "models", "--need"}
    except SystemExit as error:
        assert error.code == 0 or "CUDA" in capsys.readouterr().err, (page, words)


# Generated parts


def test_the_figures_are_what_the_code_draws():
    """Fault: figures of an older code."""
    drawn = hooks.figures()
    assert {file.name for file in hooks.FIGURES.glob("*.svg")} == set(drawn)
    for name, svg in drawn.items():
        assert svg == (hooks.FIGURES / name).read_text(), f"{name}: run python docs/hooks.py"
        assert any(f"figures/{name}" in text for text in PAGES.values()), name


def test_settings_are_all_there():
    """Fault: a setting without a line, or without its choices."""
    page = hooks.settings_page()
    for field in vars(EPConfig()):
        assert f"| `{field}` |" in page
    assert "`dropless`, `rank`, `source`, `expert`" in page and "`timeout_s`" in page
    assert "## TrainerConfig" in page or "## LaunchSettings" in page or page.count("## ") > 8


def test_every_error_message_is_listed():
    """Fault: errors that a search of the site does not find."""
    found, page = hooks.messages(), hooks.messages_page()
    assert len(found) > 250
    assert any("payload slots are leased" in m.words for m in found)
    for message in found:
        assert message.words.replace("`", "'").replace("\n", " ") in page


def templates() -> str:
    """All strings of the package, with … for what is filled in."""
    folders = [ROOT / "ep_plugin", ROOT / "adapters", ROOT / "kernels"]
    texts = []
    for file in sorted({file.resolve() for folder in folders for file in folder.rglob("*.py")}):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr | ast.Constant | ast.BinOp):
                texts.append(hooks._words(node))
    return "\n".join(texts)


def test_troubleshooting_quotes_messages_that_exist():
    """Fault: a message that was changed, so that nobody finds its remedy."""
    everything = templates()
    ours, torchs = PAGES["troubleshooting.md"].split("\n## From torch and Python\n")
    headings = re.findall(r"^### `(.*)`$", ours, re.MULTILINE)
    assert len(headings) > 15 and "\n## " not in torchs
    for heading in headings:
        pieces = [piece for piece in re.split(r"\s*…\s*", heading) if len(piece) > 3]
        assert pieces, heading
        for piece in pieces:
            assert piece in everything, f"{heading!r}: {piece!r} is not in the code"


def test_the_site_names_every_page():
    """Fault: a page that no menu leads to, or a menu that leads nowhere."""
    named = set(re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert named == {page.name for page in DOCS.glob("*.md")} | {"settings.md", "messages.md"}


@pytest.mark.slow
def test_the_site_builds(tmp_path):
    """Fault: a link that leads nowhere, a page that cannot be made."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for page in ("index.html", "settings/index.html", "messages/index.html", "concepts/index.html"):
        assert (tmp_path / page).is_file()
    assert "dropless" in (tmp_path / "settings" / "index.html").read_text()
