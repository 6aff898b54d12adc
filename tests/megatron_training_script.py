"""A training script of a Megatron user: its own flags, its own loop, and not a word of other dispatchers.

Run by ``test_megatron_script.py``. Only the small models and what lets Megatron run on CPU come from the tests.
"""

import argparse
import os
import typing

import torch
import torch.distributed as dist

from tests import megatron_models as mm


def main() -> None:
    mm.use_version(os.environ.get("TEST_MEGATRON"))
    from megatron.core import __version__
    from megatron.core.transformer.transformer_config import TransformerConfig

    backends = TransformerConfig.__dataclass_fields__["moe_flex_dispatcher_backend"].type
    parser = argparse.ArgumentParser()
    parser.add_argument("--moe-token-dispatcher-type", choices=["allgather", "alltoall", "flex"], default="alltoall")
    if __version__ < "0.17":  # as the scripts of a version do: flags listed by hand, or made from the config's fields
        parser.add_argument("--moe-flex-dispatcher-backend", choices=["deepep", "hybridep"], default="deepep")
    else:
        parser.add_argument("--moe-flex-dispatcher-backend", choices=typing.get_args(backends), default="deepep")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    sizes = dict(ep=dist.get_world_size())
    with mm.parallel(**sizes):
        cfg = mm.config(sizes, **vars(args))
        models = mm.chunks(cfg)
        optimizer = torch.optim.Adam(models[0].parameters(), lr=3e-3)
        losses = []
        for step in range(3):
            optimizer.zero_grad()
            losses += mm.run_step(cfg, models, [mm.tokens(10 * step + dist.get_rank())])
            mm.reduce_gradients(models[0])
            optimizer.step()
        mlp = models[0].decoder.layers[0].mlp
        if dist.get_rank() == 0:
            print("dispatcher", type(mlp.token_dispatcher).__name__)
            print("experts", type(mlp.experts.__dict__.get("forward")).__name__)
            print("losses", *(f"{loss:.5f}" for loss in losses), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
