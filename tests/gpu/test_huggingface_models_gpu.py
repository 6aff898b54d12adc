"""Models of every form on GPUs against the unpatched model, and the registry of transformers with NCCL and FSDP2."""

from __future__ import annotations

import functools
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")

from ep_plugin.adapters.huggingface import patch_model
from ep_plugin.adapters.huggingface_architectures import architectures
from ep_plugin.adapters.huggingface_families import find_sites
from ep_plugin.config import CapacityConfig, EPConfig
from ep_plugin.topology import ProcessGroups, layout
from tests.hf_architectures import ROUNDS, build
from tests.test_huggingface_models import REPRESENTATIVE, check_one, difference

Ranks = tuple[int, int, torch.device]
VERSION = tuple(int(part) for part in version("transformers").split(".")[:2])
ROOMY = EPConfig(heap="torch", capacity=CapacityConfig(factor=4.0), max_tokens=64, slots=8, timeout_s=30)
needs_registry = pytest.mark.skipif(VERSION < (5, 23), reason="needs transformers 5.23")


@pytest.mark.parametrize("experts", ["auto", "foreign"])
def test_forms_train_like_the_unpatched_model(ranks: Ranks, experts: str) -> None:
    """Catches row counts that only the device knows taken for those of the buffers, in the forms that differ."""
    rank, world, device = ranks
    have = {row.name for row in architectures()}
    groups = ProcessGroups.create(layout(world, ep=world))
    wrong = {}
    for name in REPRESENTATIVE:
        if name not in have or (experts == "foreign" and name == "longcat_flash"):
            continue
        make = functools.partial(_on_gpu, name, device, torch.float32)
        found = check_one(rank, world, make, groups, ROOMY, 50 * ROUNDS, False, experts)
        if found:
            wrong[name] = found
    groups.destroy()
    assert not wrong, wrong


def _on_gpu(name: str, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    return build(name).to(device, dtype)


def test_grouped_products_in_bfloat16(ranks: Ranks) -> None:
    """Catches a layout that the grouped GEMM reads otherwise than the loop does: transposed, biased, interleaved, two
    parameters, one module per expert."""
    rank, world, device = ranks
    groups = ProcessGroups.create(layout(world, ep=world))
    for name in ("mixtral", "gpt_oss", "dbrx", "nemotron_h", "gemma4", "aria"):
        plain, model = (_on_gpu(name, device, torch.bfloat16) for _ in range(2))
        site, (module, family) = next(iter(find_sites(plain).items()))
        experts, width = family.experts(module), family.width(module)
        handle = patch_model(model, ROOMY, groups)
        generator = torch.Generator(device).manual_seed(rank)
        x = torch.randn(1, 48, width, generator=generator, device=device, dtype=torch.bfloat16)
        x = x if name == "dbrx" else x[0]
        idx = torch.rand(48, experts, generator=generator, device=device).argsort(1)[:, :2]
        weights = torch.rand(48, 2, generator=generator, device=device).to(torch.bfloat16)
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        outs = [
            family.own(module)(inputs[0], idx, weights),
            model.get_submodule(site)(inputs[1], idx, weights),
        ]
        for out in outs:
            out.float().square().sum().backward()
        assert difference(outs[1].detach().float().view(outs[0].shape), outs[0].detach().float()) < 3e-2, name
        assert difference(inputs[1].grad.float(), inputs[0].grad.float()) < 3e-2, name
        handle.close()
    groups.destroy()


@needs_registry
@pytest.mark.parametrize("dispatcher", ["rowwise", "block"])
def test_registry(ranks: Ranks, tmp_path: Path, dispatcher: str) -> None:
    """Catches streams of FSDP2's gathers beside ours, and gradients scaled twice."""
    from tests.test_huggingface_models_registry import train

    rank, world, _ = ranks
    folders = [str(tmp_path)]
    dist.broadcast_object_list(folders)
    train(rank, world, ["qwen3_moe", "gpt_oss"], world, replace(ROOMY, dispatcher=dispatcher), folders[0])
