"""Our dispatchers inside transformers' own expert parallelism: loading, FSDP2, gradients, saving are transformers'.

In float32: in float64 FSDP2 divides gradients twice where one rank holds an expert, whoever dispatches.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ep_plugin.adapters.huggingface_families import GENERIC
from ep_plugin.adapters.huggingface_registry import register
from ep_plugin.config import EPConfig
from tests.hf_architectures import ROUNDS, build, forward, model_class, tokens
from tests.test_huggingface_models import CONFIG, STEPS, difference, optimizer_of, reference

NAME = "ep_plugin"


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def load(name: str, folder: str, world: int, ep: int) -> nn.Module:
    """The saved model, sharded by transformers."""
    from transformers.distributed import DistributedConfig

    rank = str(dist.get_rank())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(world)}
    distributed = DistributedConfig(fsdp_size=world, ep_size=ep, ep_implementation=NAME)
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return model_class(name).from_pretrained(folder, dtype=torch.float32, distributed_config=distributed, **plain)


def train(rank: int, world: int, names: list[str], ep: int, config: EPConfig, folder: str) -> None:
    for name in names:
        path = f"{folder}/{name}-{world}-{ep}"
        if rank == 0:
            build(name).save_pretrained(path)
        dist.barrier()
        plain = model_class(name).from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        )
        expected = reference(plain.train().to("cuda" if torch.cuda.is_available() else "cpu"), world)
        with register(NAME, config) as registered:
            model = load(name, path, world, ep).train()
            optimizer = optimizer_of(model)
            for step in range(STEPS):
                optimizer.zero_grad()
                out, loss = forward(model, tokens(step, rank), seed=100 * step + rank)
                loss.backward()
                assert abs(loss.item() - expected.losses[step][rank]) < ROUNDS, name
                assert difference(whole(out.detach()), expected.logits[step][rank]) < ROUNDS, name
                if not step:
                    for key, p in model.named_parameters():
                        if p.grad is not None:
                            assert difference(whole(p.grad), expected.gradients[key], 1e-3) < ROUNDS, f"{name} {key}"
                optimizer.step()
            for key, p in model.named_parameters():
                assert difference(whole(p.detach()), expected.parameters[key], 1e-2) < 10 * ROUNDS, f"{name} {key}"
            sent = registered.bytes_sent()
            assert sent is None or (sent > 0) == (ep > 1)
            if sent is None:  # rowwise on GPUs: rows went through its slots all the same
                dispatchers = [d for each in registered._sets.values() for d in each]
                assert any(d.stats()["slots_peak"] > 0 for d in dispatchers), name
            model.save_pretrained(f"{path}-saved")
        dist.barrier()
        saved = model_class(name).from_pretrained(f"{path}-saved", dtype=torch.float32).to(model.device)
        for key, p in saved.named_parameters():
            assert difference(p.detach(), expected.parameters[key], 1e-2) < 10 * ROUNDS, f"{name} {key} saved"


@pytest.mark.slow
def test_models_train_and_save_through_the_registry(pool, tmp_path):
    """Catches gradients scaled twice or not at all beside FSDP2's own factor, and local ids taken for global ones."""
    pool.run(train, 2, ["qwen3_moe", "gpt_oss", "muse_spark"], 2, CONFIG, str(tmp_path), timeout=300)
    block = replace(CONFIG, dispatcher="block")
    pool.run(train, 4, ["deepseek_v3"], 2, block, str(tmp_path), timeout=300)


def misuse(rank: int, world: int, folder: str) -> None:
    from transformers.distributed import DistributedConfig

    with register(NAME, CONFIG), pytest.raises(ValueError, match="'ep_plugin' is registered already; taken: .*auto"):
        register(NAME, CONFIG)
    with pytest.raises(ValueError, match="ep_plugin"):  # transformers says that the name is unknown again
        load("mixtral", folder, world, 2)
    with register(NAME, CONFIG), pytest.raises(ValueError, match="tp_size=2 ranks would send the same tokens"):
        distributed = DistributedConfig(tp_size=2, ep_size=2, ep_implementation=NAME)
        model_class("mixtral").from_pretrained(folder, distributed_config=distributed)


@pytest.mark.slow
def test_names_and_degrees_that_do_not_fit_are_errors(pool, tmp_path):
    """Catches a second registration that silently takes the place of the first, and tokens sent twice under TP."""
    build("mixtral").save_pretrained(tmp_path)
    pool.run(misuse, 2, str(tmp_path), timeout=300)
    with pytest.raises(ValueError, match="dispatcher='local' keeps all experts on every rank"):
        register(NAME, replace(CONFIG, dispatcher="local"))
    with pytest.raises(ValueError, match="weight_at='input' scales what experts read"):
        register(NAME, replace(CONFIG, weight_at="input"))


def test_a_model_that_computes_something_of_its_own_is_said_once(caplog):
    """Catches a silent fall back to transformers' own code."""
    from ep_plugin.adapters import huggingface

    huggingface._said.clear()
    module = next(m for m in build("muse_spark").modules() if type(m).__name__ == "MuseSparkExperts")
    with caplog.at_level(logging.INFO, logger="ep_plugin"):
        for _ in range(2):
            assert huggingface.choose_layout("x", module, GENERIC, "auto") is None
    assert [record.message for record in caplog.records] == [
        "MuseSparkExperts runs its own code on the rows that arrive: it normalises the output of every expert"
    ]
    assert huggingface.choose_layout("x", module, GENERIC, "foreign") is None
