"""Gradients of a model with sharded experts: scale, sums over replicas, norm, and a guard on the optimizer step.

With W data-parallel ranks and the loss averaged over ranks: a dense gradient is the mean over the W ranks, which DDP
makes. An expert gradient after backward is already the sum over the tokens of its EP_MP group; dividing it by W and
summing it over EP_DP makes it the gradient of the same mean (report, section 5.1: dense parameters reduce over D ranks,
expert parameters over D_E).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..topology import ProcessGroups


class ExpertGradients:
    """Keeps the gradients of ``model``, whose ``experts`` (by name) are sharded, equal to those of the whole model.

    Every expert gradient is scaled by 1/W before it is accumulated, so accumulation over microbatches stays linear. The
    sums over replicas are made once per step, by ``sync`` or, for an attached optimizer, by its step. An optimizer step
    on gradients that still lack them raises ``RuntimeError``. Dense parameters may be reduced by DDP, by FSDP2 (which
    makes them DTensors), or by nobody; then ``sync`` averages them. ``groups`` None: one process.
    """

    def __init__(self, model: nn.Module, experts: dict[str, nn.Parameter], groups: ProcessGroups | None) -> None:
        self.model, self.experts, self.groups = model, experts, groups
        self.world = 1 if groups is None else groups.layout.dp
        self.replicas = 1 if groups is None else groups.layout.ep_dp
        self.attach_all = False  # every optimizer counts as attached
        self.ddp = False  # reduces the dense gradients, as far as has been seen
        self.checks: list[Callable[[], None]] = []  # to raise, before a step, what its dispatchers could not
        self._pending = False  # a backward has run since the last sync
        self._synced = False  # the gradients in place were summed over EP_DP and no step has used them
        self._attached: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._checked: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._hooks = [self._watch(p) for p in experts.values()]
        # Optimizers keep these two for good: they must not keep a forgotten model.
        before, after = weakref.WeakMethod(self._before_step), weakref.WeakMethod(self._after_step)
        self._hooks.append(register_optimizer_step_pre_hook(lambda *step: _call(before, *step)))
        self._hooks.append(register_optimizer_step_post_hook(lambda *step: _call(after, *step)))

    def _watch(self, parameter: nn.Parameter) -> Any:
        def arrived(grad: Tensor) -> Tensor:
            self._arrived(parameter)
            return grad if self.world == 1 else grad / self.world

        # A hook needs requires_grad when it is registered, and must be there if a frozen expert is thawed later.
        trainable = parameter.requires_grad
        handle = parameter.requires_grad_(True).register_hook(arrived)
        parameter.requires_grad_(trainable)
        return handle

    def _arrived(self, parameter: nn.Parameter) -> None:
        if self._synced and self.replicas > 1 and parameter.grad is not None and bool(parameter.grad.any()):
            raise RuntimeError(
                "a backward adds to expert gradients that were already summed over EP_DP, which would count them"
                f" {self.replicas} times; sync once per step, after its last backward, and zero the gradients after it"
            )
        self._synced, self._pending = False, True

    @property
    def dense(self) -> list[nn.Parameter]:
        """Every parameter that is not a sharded expert, as the model holds them now: FSDP2 replaces parameters, and
        LoRA adds some."""
        experts = {id(p) for p in self.experts.values()}
        return [p for p in self.model.parameters() if id(p) not in experts]

    def _unreduced(self) -> list[nn.Parameter]:
        """Dense parameters of which nobody else averages the gradient over DP."""
        if self.ddp or self.world == 1:
            return []
        plain = []
        for p in self.dense:
            if not isinstance(p, DTensor):
                plain.append(p)
            elif p.device_mesh.size() != self.world:
                raise ValueError(
                    f"FSDP2 shards dense parameters over a mesh of {p.device_mesh.size()} ranks, but {self.world} ranks"
                    " see different data: give fully_shard a mesh over all of them"
                )
        return [p for p in plain if p.requires_grad]

    def see_ddp(self) -> None:
        """Note the DDP module whose forward is running; ``RuntimeError`` if it manages sharded experts."""
        ddp = getattr(DistributedDataParallel, "_active_ddp_module", None)
        if ddp is None:
            return
        if ddp._join_config.enable:
            raise RuntimeError(
                "DDP's join stands in for the gradients of a rank that has run out of batches, but not for its experts,"
                " which the other ranks' tokens still need: take the batches from even_batches instead"
            )
        if ddp in self._checked:
            return
        managed = {id(p) for p in ddp._module_parameters}
        wrong = [name for name, p in self.experts.items() if id(p) in managed]
        if wrong:
            raise RuntimeError(
                f"DDP manages the sharded experts ({wrong[0]}, …) and has overwritten them with rank 0's: patch the"
                " very module that DDP wraps, and patch it first"
            )
        self._checked.add(ddp)
        self.ddp = True

    @property
    def lacking(self) -> list[str]:
        """The sums that the gradients in place still lack, in words."""
        if not self._pending:
            return []
        dense = ["the mean of dense gradients over DP"] if self._unreduced() else []
        return dense + (["the sum of expert gradients over EP_DP"] if self.replicas > 1 else [])

    def sync(self) -> None:
        """Make every gradient that of the global batch. Once per step, after its last backward, on all ranks.

        Nothing is sent where DDP or FSDP2 reduces the dense gradients and D_E = 1. A second call without a backward
        does nothing. A parameter with a gradient on some ranks only counts as zero on the others. Raises
        ``RuntimeError`` when some ranks had no backward.
        """
        unreduced = self._unreduced()
        if self.groups is not None and (self.replicas > 1 or unreduced):
            present = self._agree(self.groups, unreduced)
            if self._pending:
                dense = [p for p in unreduced if id(p) in present]
                work = _all_reduce(dense, self.groups.dp)
                if self.replicas > 1:
                    work += _all_reduce([p for p in self.experts.values() if id(p) in present], self.groups.ep_dp)
                for grad, sent, handle in work:
                    handle.wait()
                    if sent is not grad:
                        grad.copy_(sent)
                for p in dense:
                    assert p.grad is not None
                    p.grad /= self.world
        self._synced = self._synced or self._pending
        self._pending = False

    def _agree(self, groups: ProcessGroups, dense: list[nn.Parameter]) -> set[int]:
        """Ids of those of ``dense`` and of the experts with a gradient on any rank; raises on all ranks unless all or
        none had a backward."""
        params = [*dense, *self.experts.values()]
        mine = [self._pending, not self._pending, *(p.grad is not None for p in params)]
        seen = torch.tensor(mine, dtype=torch.int32, device=params[0].device)
        dist.all_reduce(seen, dist.ReduceOp.MAX, group=groups.dp)
        had, had_not, *any_rank = seen.tolist()
        if had and had_not:
            raise RuntimeError(
                f"some data-parallel ranks ran a backward since the last sync and others did not (this one:"
                f" {self._pending}); a rank without data must still run both, on tokens without loss"
            )
        return {id(p) for p, flag in zip(params, any_rank, strict=True) if flag}

    def total_norm(self, norm_type: float) -> Tensor:
        """The norm of the whole model's gradient, every expert counted once; a scalar, equal on all ranks."""
        plain, sharded = _by_kind(self.dense)
        experts = get_total_norm(_grads(self.experts.values()), norm_type)
        norms = [get_total_norm(_grads(plain), norm_type), experts]
        if sharded:
            norms.append(cast(DTensor, get_total_norm(_grads(sharded), norm_type)).full_tensor())
        device = next(iter(self.experts.values())).device
        dtype = functools.reduce(torch.promote_types, (norm.dtype for norm in norms), torch.float32)
        dense, experts, *fsdp = (norm.to(device, dtype) for norm in norms)
        infinite = norm_type == float("inf")
        if not infinite:
            experts = experts**norm_type
        if self.groups is not None:
            dist.all_reduce(experts, dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=self.groups.ep_mp)
        if infinite:
            return torch.stack([dense, experts, *fsdp]).max()
        total: Tensor = sum((norm**norm_type for norm in fsdp), dense**norm_type + experts)
        return total ** (1 / norm_type)

    def clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
        """Sync, scale all gradients down to a total norm of ``max_norm``, and give the norm before."""
        self.sync()
        norm = self.total_norm(norm_type)
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise RuntimeError(f"the gradient's norm of order {norm_type} is {float(norm)}, so it cannot be clipped")
        for params in (*_by_kind(self.dense), list(self.experts.values())):
            clip_grads_with_norm_(params, max_norm, norm)
        return norm

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Let a step of ``optimizer`` sync first what was not synced yet."""
        held = {id(p) for p in _params(optimizer)}
        missing = [name for name, p in self.experts.items() if p.requires_grad and id(p) not in held]
        if missing:
            raise ValueError(
                f"the optimizer does not hold {missing[0]}: build it from the parameters of the patched model"
            )
        self._attached.add(_inner(optimizer))

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        ours = {id(p) for p in (*self.dense, *self.experts.values())}
        if not any(id(p) in ours for p in _params(optimizer)):
            return
        for check in self.checks:
            check()
        if not self.lacking:
            return
        if not self.attach_all and optimizer not in self._attached:
            raise RuntimeError(
                f"an optimizer step on gradients that lack {' and '.join(self.lacking)}: call sync_gradients() after"
                " the last backward, or attach(optimizer) once"
            )
        self.sync()

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        experts = {id(p) for p in self.experts.values()}
        if any(id(p) in experts for p in _params(optimizer)):
            self._synced = False

    def close(self) -> None:
        """Remove the hooks; idempotent."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def _call(method: weakref.WeakMethod[Any], *args: Any) -> None:
    alive = method()
    if alive is not None:
        alive(*args)


def _inner(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside a wrapper such as accelerate's, whose step is the one that torch's hooks see."""
    inner = getattr(optimizer, "optimizer", None)
    return _inner(inner) if isinstance(inner, torch.optim.Optimizer) else optimizer


def _by_kind(params: Iterable[nn.Parameter]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Plain parameters and those that FSDP2 shards, which no operation of torch takes together."""
    kinds: tuple[list[nn.Parameter], list[nn.Parameter]] = [], []
    for p in params:
        kinds[isinstance(p, DTensor)].append(p)
    return kinds


def _params(optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])


def _grads(params: Iterable[nn.Parameter]) -> list[Tensor]:
    return [p.grad for p in params if p.grad is not None]


def _all_reduce(params: list[nn.Parameter], group: dist.ProcessGroup) -> list[tuple[Tensor, Tensor, Any]]:
    """Start summing the gradients over ``group``; gives (gradient, what was sent, work) of each."""
    work = []
    for p in params:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        sent = p.grad if p.grad.is_contiguous() else p.grad.contiguous()
        work.append((p.grad, sent, dist.all_reduce(sent, group=group, async_op=True)))
    return work
