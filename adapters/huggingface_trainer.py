"""A patched model in accelerate and in transformers' ``Trainer``.

    handle = patch_model(model, EPConfig(), groups)
    trainer = ExpertParallelTrainer(handle=handle, model=model, args=TrainingArguments(...), ...)
    trainer.train()

``ExpertParallelMixin`` does the same for other trainers that derive from ``Trainer``:
``class Mine(ExpertParallelMixin, SFTTrainer)``. A loop of one's own with accelerate calls ``use_accelerator``.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ..train.overflow import RERUNS, Overflows, still_too_small
from .huggingface import PatchedModel
from .huggingface_optimizer import shard_optimizer

TRAINING_STATE = "training_state"
PLAIN, FSDP = ("NO", "MULTI_CPU", "MULTI_GPU"), "FSDP"


def use_accelerator(handle: PatchedModel, accelerator: Any) -> None:
    """Have ``accelerator`` treat the patched model right; call it before ``accelerator.prepare``.

    ``clip_grad_norm_`` takes the norm of the whole model, ``get_state_dict`` gathers it, optimizer steps sync its
    gradients, and FSDP2 leaves the experts alone. ``save_state``, which would keep rank 0's share of the optimizer
    alone, and ``join_uneven_inputs`` raise and say what to use. Raises ``ValueError`` for what does not go with sharded
    experts: FSDP1, DeepSpeed, float16 scaling, loading of weights on rank 0 alone.
    """
    kind = accelerator.distributed_type.value
    if kind not in (*PLAIN, FSDP) or (kind == FSDP and not accelerator.is_fsdp2):
        raise ValueError(f"accelerate's {kind} does not go with sharded experts: use DDP, or FSDP with fsdp_version=2")
    if accelerator.mixed_precision == "fp16":
        raise ValueError(
            "mixed_precision='fp16' scales the loss and skips a step on each rank alone, so experts and replicas would"
            " part: use 'bf16'"
        )
    if kind == FSDP:
        _leave_experts(handle, accelerator.state.fsdp_plugin)
        if accelerator.mixed_precision == "bf16":  # FSDP2 casts what it shards, and no autocast runs
            handle.dispatchers.row_dtype = torch.bfloat16
    handle.gradients.attach_all = True
    own_clip, own_state = accelerator.clip_grad_norm_, accelerator.get_state_dict

    def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        experts = {id(p) for p in handle.expert_parameters.values()}
        if not any(id(p) in experts for p in given):
            clipped: Tensor = own_clip(given, max_norm, norm_type)
            return clipped
        missing = {id(p) for p in handle.model.parameters() if p.grad is not None} - {id(p) for p in given}
        if missing:
            raise ValueError(
                f"clip_grad_norm_ was given the experts but not {len(missing)} other parameters with gradients; the"
                " patched model is clipped as a whole"
            )
        return handle.clip_grad_norm_(max_norm, norm_type)

    def get_state_dict(model: nn.Module, unwrap: bool = True) -> Any:
        return handle.full_state_dict() if _holds(model, handle) else own_state(model, unwrap)

    def save_state(*args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            "accelerator.save_state would keep rank 0's experts and their optimizer state alone: use"
            " PatchedModel.save_training_state and load_training_state on all ranks"
        )

    def join_uneven_inputs(*args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            "a rank that has run out of batches is still needed for its experts: use even_batches (accelerate's, or"
            " ours for a loop of one's own) instead of join_uneven_inputs"
        )

    accelerator.clip_grad_norm_, accelerator.get_state_dict = clip_grad_norm_, get_state_dict
    accelerator.save_state = accelerator.load_state = save_state
    accelerator.join_uneven_inputs = join_uneven_inputs


def _leave_experts(handle: PatchedModel, plugin: Any) -> None:
    if plugin.cpu_ram_efficient_loading:
        raise ValueError(
            "FSDP's cpu_ram_efficient_loading takes the weights of rank 0, whose experts are not the others': set it to"
            " false; from_pretrained of this package loads every rank's own"
        )
    if plugin.ignored_modules is not None:
        raise ValueError(f"FSDP's ignored_modules={plugin.ignored_modules!r}: the experts must be what it ignores")
    plugin.ignored_modules = [nn.ParameterList(handle.expert_parameters.values())]


def _holds(model: nn.Module, handle: PatchedModel) -> bool:
    return any(module is handle.model for module in model.modules())


class ExpertParallelMixin:
    """In front of a ``Trainer``: ``handle`` is what ``patch_model`` gave for its model.

    Checkpoints hold a plain transformers model and a ``training_state``, from which any EP degree resumes.
    ``shard_optimizer_state`` spreads the optimizer's state over the ranks that hold the same parameters.
    """

    # Of the trainer behind it.
    args: Any
    accelerator: Any
    is_fsdp_enabled: bool
    lr_scheduler: Any
    model: Any
    optimizer: Any
    processing_class: Any
    push_to_hub: Any
    state: Any

    def __init__(self, *args: Any, handle: PatchedModel, shard_optimizer_state: bool = False, **kwargs: Any) -> None:
        self.handle, self.shard_optimizer_state = handle, shard_optimizer_state
        super().__init__(*args, **kwargs)
        if not _holds(self.model, handle):
            raise ValueError("handle is of another model than the one to train: pass handle.model, or its PEFT model")

    def create_accelerator_and_postprocess(self) -> None:
        """As the trainer's own, for sharded experts."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        if not self.args.accelerator_config.even_batches:
            raise ValueError(
                "accelerator_config.even_batches=false lets a rank run out of batches while its experts are needed"
            )
        if self.shard_optimizer_state and self.is_fsdp_enabled:
            raise ValueError("shard_optimizer_state goes with DDP; FSDP2 shards the state of what it shards already")
        use_accelerator(self.handle, self.accelerator)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """The trainer's own, its state shared out if asked for."""
        made = self.optimizer is None
        optimizer: torch.optim.Optimizer = super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        if made and self.shard_optimizer_state:
            accepted = inspect.signature(type(optimizer)).parameters
            defaults = {name: value for name, value in optimizer.defaults.items() if name in accepted}
            self.optimizer = optimizer = shard_optimizer(
                self.handle, type(optimizer), optimizer.param_groups, **defaults
            )
        return optimizer

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """The trainer's own. A forward whose dropless routes overflowed an expert rank's buffers runs again, on all
        ranks, with larger ones, before any gradient is made of it."""
        for _ in range(1 + RERUNS):
            loss = super().compute_loss(model, dict(inputs), *args, **kwargs)  # type: ignore[misc]
            overflows = Overflows(self.handle.dispatchers)
            overflow = overflows.found()
            if overflow is None:
                return loss
            del loss  # and with it what still leases a buffer
            overflows.regrow(overflow)
        raise still_too_small("a forward")

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return self.handle.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return self.handle.clip_grad_norm_(float("inf")) if grad_norm is None else grad_norm

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write a plain transformers checkpoint; on all ranks."""
        folder = Path(output_dir if output_dir is not None else self.args.output_dir)
        if self._is_peft():
            state = self.handle.full_state_dict()
            if self.args.should_save:
                self.accelerator.unwrap_model(self.model).save_pretrained(folder, state_dict=_named_for_peft(state))
        else:
            self.handle.save_pretrained(folder)
        if self.args.should_save:
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)
            torch.save(self.args, folder / "training_args.bin")
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _is_peft(self) -> bool:
        return self.accelerator.unwrap_model(self.model) is not self.handle.model

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.handle.save_training_state(Path(output_dir, TRAINING_STATE), self.optimizer)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, "scheduler.pt"))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        self.handle.load_training_state(Path(checkpoint, TRAINING_STATE), self.optimizer)
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint, "scheduler.pt"), weights_only=True))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self.handle.load_training_state(Path(resume_from_checkpoint, TRAINING_STATE))

    def _load_best_model(self) -> None:
        self.handle.load_training_state(Path(self.state.best_model_checkpoint, TRAINING_STATE))


def _named_for_peft(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state dict of the model inside a PEFT model, by the names that the latter gives."""
    return {f"base_model.model.{name}": tensor for name, tensor in state.items()}


def __getattr__(name: str) -> Any:
    """``ExpertParallelTrainer``, made when it is asked for: importing transformers' trainer takes seconds."""
    if name != "ExpertParallelTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from transformers import Trainer

    made = type(name, (ExpertParallelMixin, Trainer), {"__doc__": ExpertParallelMixin.__doc__, "__module__": __name__})
    globals()[name] = made
    return made
