"""The Hugging Face adapter: a patched model trains exactly like the unpatched one on the same global batch."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass, field, replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ep_plugin.adapters import huggingface
from ep_plugin.adapters.huggingface import PatchedModel, patch_model
from ep_plugin.adapters.huggingface_dispatchers import Shape, with_slots
from ep_plugin.adapters.huggingface_experts import find_experts
from ep_plugin.adapters.huggingface_families import check_layout
from ep_plugin.adapters.huggingface_replicas import fingerprint
from ep_plugin.config import CapacityConfig, EPConfig
from ep_plugin.topology import ProcessGroups, experts_of, layout
from tests import hf_models
from tests.hf_models import EXPERTS, HIDDEN, TOP_K, LossOf, PlainExperts, PlainModel, build, reference_step, tokens

DEDUP = EPConfig(timeout_s=60)
ROUTE = replace(DEDUP, form="route")
BLOCK = replace(DEDUP, dispatcher="block")
LOCAL = replace(DEDUP, dispatcher="local")


@dataclass(frozen=True)
class Case:
    """One way to train the patched model; everything is compared with the unpatched one."""

    model: str = "plain"
    ep: int = 4
    config: EPConfig = field(default_factory=lambda: DEDUP)
    dtype: torch.dtype = torch.float64
    ddp: bool = True
    steps: int = 2
    microbatches: int = 1
    sequences: tuple[int, ...] = (2, 2, 2, 2)  # by rank
    same_token: bool = False
    reentrant: bool | None = None  # checkpointing
    pattern: str | None = None
    experts: str = "ours"
    settings: dict = field(default_factory=dict)

    @property
    def tolerance(self) -> float:
        return {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 5e-2}[self.dtype]

    def batches(self, step: int) -> list[list[torch.Tensor]]:
        """By rank and microbatch."""
        batches = [
            [tokens(step * self.microbatches + micro, rank, sequences) for micro in range(self.microbatches)]
            for rank, sequences in enumerate(self.sequences)
        ]
        return [[torch.full_like(ids, 7) for ids in mine] for mine in batches] if self.same_token else batches

    def forward(self, batches: list[list[torch.Tensor]]) -> LossOf:
        """The rank's loss; with unequal batches one whose mean over ranks weighs every token alike."""
        if len(set(self.sequences)) == 1:
            return hf_models.mean_loss
        count = sum(ids[:, 1:].numel() for mine in batches for ids in mine)

        def scaled(model, ids):
            out = model(input_ids=ids, labels=ids, num_items_in_batch=count)
            out.loss = out.loss * len(self.sequences)
            return out

        return scaled


def own(name: str, whole: torch.Tensor, handle: PatchedModel) -> torch.Tensor:
    """This rank's part of a tensor of the unpatched model."""
    if name not in handle.expert_parameters:
        return whole
    mine = experts_of(whole.shape[0], handle.groups.layout.ep_mp, dist.get_rank(handle.groups.ep_mp))
    return whole[mine.start : mine.stop]


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference, relative to the largest entry of the expected ``b``."""
    assert a.shape == b.shape, (a.shape, b.shape)
    return ((a - b).abs().max() / b.abs().max().clamp(min=1e-30)).item() if b.numel() else 0.0


def train_and_compare(rank, world, cases):
    for case in cases:
        try:
            compare_one(rank, world, case)
        except Exception as error:
            raise AssertionError(f"{case}") from error


def compare_one(rank, world, case):
    unpatched = build(case.model, case.dtype, **case.settings)
    model = build(case.model, case.dtype, **case.settings)
    names = {name: p.shape for name, p in model.named_parameters()}
    groups = ProcessGroups.create(layout(world, ep=case.ep))
    handle = patch_model(model, case.config, groups, pattern=case.pattern, experts=case.experts)
    assert [name for name, _ in model.named_parameters()] == list(names)
    for name, p in handle.expert_parameters.items():
        assert p.numel() * case.ep == names[name].numel(), f"{name}: not P_E / M_E"
    if case.reentrant is not None:
        for one in (unpatched, model):
            if case.model == "plain":
                one.checkpointing = case.reentrant
            else:
                one.gradient_checkpointing_enable({"use_reentrant": case.reentrant})
                one.enable_input_require_grads()
    ddp = DistributedDataParallel(model) if case.ddp else model
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (unpatched, ddp)]
    handle.attach(optimizers[1])
    for step in range(case.steps):
        batches = case.batches(step)
        forward = case.forward(batches)
        # The first step is clipped, the second is not.
        max_norm = 0.5 if step == 0 else 1e6
        expected = reference_step(unpatched, optimizers[0], batches, max_norm, forward)

        optimizers[1].zero_grad()
        loss = 0.0
        for micro, ids in enumerate(batches[rank]):
            last = micro == case.microbatches - 1
            with contextlib.nullcontext() if last or not case.ddp else ddp.no_sync():
                out = forward(ddp, ids)
                out.loss.backward()
            loss += out.loss.item()
        check_load(handle, case, batches)
        handle.sync_gradients()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        norm = handle.clip_grad_norm_(max_norm).item()
        optimizers[1].step()

        assert gradients.keys() == expected.gradients.keys()
        worst = {
            "loss": abs(loss - expected.losses[rank]) / max(1.0, expected.losses[rank]),
            "logits": difference(out.logits, expected.logits[rank]),
            "norm": abs(norm - expected.norm) / expected.norm,
        }
        worst |= {f"grad {n}": difference(g, own(n, expected.gradients[n], handle)) for n, g in gradients.items()}
        if case.dtype == torch.float64:  # AdamW's first step takes the sign of each gradient
            worst |= {n: difference(p, own(n, expected.parameters[n], handle)) for n, p in model.named_parameters()}
        wrong = {name: value for name, value in worst.items() if not value <= case.tolerance}
        assert not wrong, f"step {step}: {wrong}"
        norms = torch.full((world,), norm, dtype=torch.float64)
        dist.all_to_all_single(norms, norms.clone())
        assert (norms == norm).all(), f"ranks clip by different norms: {norms.tolist()}"
    handle.close()
    groups.destroy()


def check_load(handle, case, batches):
    """The last microbatch's routes of the EP_MP group, counted once."""
    metrics = handle.metrics()
    members = dist.get_process_group_ranks(handle.groups.ep_mp)
    asked = sum(batches[rank][-1].numel() for rank in members) * TOP_K
    assert [int(load.sum()) for load in metrics.expert_load.values()] == [asked] * len(handle.layers)
    assert metrics.drop_rate.item() == 0
    if len(members) == 1:
        assert metrics.bytes_sent == 0
    elif min(case.sequences) > 0 and not case.same_token:
        assert metrics.bytes_sent > 0


def test_plain_model_trains_like_unpatched(pool):
    """Catches a wrong scale or sum of gradients, a norm that misses or repeats experts, experts that DDP overwrites."""
    pool.run(
        train_and_compare,
        4,
        [
            Case(ep=4),
            Case(ep=2, config=ROUTE),
            Case(ep=2, config=replace(ROUTE, weight_at="source")),
            Case(ep=4, config=replace(DEDUP, weight_at="output")),
            Case(ep=2, config=BLOCK),
            Case(ep=1),
            Case(ep=1, config=LOCAL),
        ],
    )


def test_without_ddp_the_handle_averages_dense_gradients(pool):
    """Catches dense replicas that drift apart when nobody reduces their gradients."""
    pool.run(train_and_compare, 4, [Case(ep=4, ddp=False), Case(ep=2, ddp=False), Case(ep=1, ddp=False)])


def test_accumulation_checkpointing_and_odd_batches(pool):
    """Catches a scale that compounds over microbatches, routes counted again in a recomputation, a rank without tokens
    or without rows that leaves its peers alone in backward, starved experts without a gradient."""
    pool.run(
        train_and_compare,
        4,
        [
            Case(ep=2, microbatches=3),
            Case(ep=4, microbatches=2, ddp=False, config=BLOCK),
            Case(ep=2, reentrant=False, microbatches=2),
            Case(ep=4, reentrant=False, config=ROUTE),
            Case(ep=4, reentrant=True),
            Case(ep=4, sequences=(3, 0, 1, 2)),
            Case(ep=2, sequences=(0, 0, 1, 2), config=ROUTE),
            Case(ep=4, same_token=True),
            Case(ep=4, same_token=True, sequences=(0, 2, 0, 0), config=BLOCK),
            Case(ep=4, pattern="blocks.1.*"),
        ],
    )


def test_foreign_experts_train_like_unpatched(pool):
    """Catches local ids off by the rank's first expert, weights applied twice, a graph cut where no row arrives, and a
    norm that all experts share without the gradient of the other ranks' rows."""
    pool.run(
        train_and_compare,
        4,
        [
            Case(ep=4, experts="foreign"),
            Case(ep=2, experts="foreign", config=replace(DEDUP, weight_at="output")),
            Case(ep=2, experts="foreign", config=replace(ROUTE, weight_at="source"), reentrant=False),
            Case(ep=4, experts="foreign", same_token=True, config=BLOCK),
            Case(ep=4, experts="foreign", settings={"norm": True}),
            Case(ep=2, experts="foreign", settings={"norm": True}, ddp=False, same_token=True),
        ],
    )


def test_float32_and_bfloat16_gradients(pool):
    """Catches sums or router weights rounded to a lower precision than the rows'."""
    one_layer = {"layers": 1}  # a second layer's routes may flip by rounding
    pool.run(
        train_and_compare,
        4,
        [
            Case(ep=4, dtype=torch.float32, steps=1),
            Case(ep=2, dtype=torch.float32, steps=1, config=BLOCK),
            Case(ep=2, dtype=torch.bfloat16, steps=1, settings=one_layer),
        ],
    )


TRANSFORMERS = ("olmoe", "mixtral", "qwen3_moe")


@pytest.mark.slow
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers_model_trains_like_unpatched(pool, name):
    """Catches what the plain model cannot show: transformers' own call of the experts, router dtypes, aux losses on."""
    pool.run(
        train_and_compare,
        4,
        [
            Case(name, ep=4, steps=3),
            Case(name, ep=2, config=ROUTE),
            Case(name, ep=1),
            Case(name, ep=2, config=replace(DEDUP, weight_at="output"), microbatches=2),
            Case(name, ep=4, config=BLOCK, reentrant=False),
            Case(name, ep=2, reentrant=True),
            Case(name, ep=4, config=ROUTE, sequences=(1, 3, 2, 1)),
            Case(name, ep=4, steps=1, dtype=torch.float32),
            Case(name, ep=2, experts="foreign", config=BLOCK),
        ],
        timeout=400,
    )


@pytest.mark.slow
def test_transposed_biased_interleaved_clamped_experts(pool):
    """Catches a layout read wrongly: gpt_oss stores [E, D, G] with biases, gate and up interleaved, a clamped gate."""
    pool.run(
        train_and_compare,
        4,
        [
            Case("gpt_oss", ep=4),
            Case("gpt_oss", ep=2, config=replace(BLOCK, weight_at="output")),
            Case("gpt_oss", ep=2, experts="foreign", config=ROUTE),
        ],
        timeout=400,
    )


@pytest.mark.slow
def test_checkpoint_loads_in_unpatched_transformers(pool, tmp_path):
    """Catches a checkpoint that holds one rank's experts, or all of them in a wrong order."""
    pool.run(save_and_load, 4, str(tmp_path), timeout=400)


def save_and_load(rank, world, folder):
    from transformers import AutoModelForCausalLM

    for name in TRANSFORMERS:
        for ep in (4, 2):
            whole = {key: value.clone() for key, value in build(name, torch.float32).state_dict().items()}
            model = build(name, torch.float32)
            groups = ProcessGroups.create(layout(world, ep=ep))
            handle = patch_model(model, DEDUP, groups)
            with pytest.raises(ValueError, match=r"this rank's .* experts alone"):
                model.save_pretrained(f"{folder}/{rank}")
            with pytest.raises(ValueError, match=r"this rank's .* experts alone"):
                model.save_pretrained(f"{folder}/{rank}", state_dict=model.state_dict())
            state = handle.full_state_dict()
            assert (rank == 0) == bool(state)
            for full in filter(None, (state, handle.full_state_dict(all_ranks=True))):
                assert full.keys() == whole.keys()
                assert all(torch.equal(full[key], whole[key]) for key in whole)
            if rank == 0:
                target = f"{folder}/{name}-{ep}"
                model.save_pretrained(target, state_dict=state)
                loaded = AutoModelForCausalLM.from_pretrained(target).state_dict()
                assert loaded.keys() == whole.keys()
                assert all(torch.equal(loaded[key], whole[key]) for key in whole)
            handle.close()
            groups.destroy()


def test_evaluation_needs_no_backward_and_is_not_counted(pool):
    """Catches buffers that only a backward gives back, and evaluation that leaks into the training metrics."""
    pool.run(evaluate, 2)


def evaluate(rank, world):
    unpatched, model = build("plain"), build("plain")
    groups = ProcessGroups.create(layout(world, ep=2))
    handle = patch_model(model, replace(DEDUP, slots=2), groups)
    ids = tokens(0, rank)
    model(input_ids=ids, labels=ids).loss.backward()
    load = handle.metrics().expert_load
    model.eval()
    for step in range(20):
        ids = tokens(step, rank, sequences=1 + (step + rank) % 3)
        with torch.no_grad():
            assert difference(model(ids, ids).logits, unpatched(ids, ids).logits) < 1e-12
    assert all(torch.equal(handle.metrics().expert_load[name], load[name]) for name in load)
    handle.close()
    handle.close()
    with pytest.raises(RuntimeError, match="PatchedModel is closed"):
        model(ids, ids)


def test_dropped_routes_show_in_the_metrics(pool):
    """Catches drops that the trainer does not hear of."""
    pool.run(drop_routes, 2)


def drop_routes(rank, world):
    groups = ProcessGroups.create(layout(world, ep=2))
    capacity = CapacityConfig(policy="rank", factor=0.5)
    handle = patch_model(build("plain"), replace(DEDUP, capacity=capacity), groups)
    ids = tokens(0, rank)
    handle.model(ids, ids)
    metrics = handle.metrics()
    # At most half of all routes fit on the two ranks together.
    assert 0.5 <= metrics.drop_rate.item() < 1
    assert {int(load.sum()) for load in metrics.expert_load.values()} == {2 * ids.numel() * TOP_K}
    handle.close()


def test_ranks_that_start_differently_are_refused(pool):
    """Catches experts of different models put together, which trains without an error."""
    pool.run(start_differently, 2)


def start_differently(rank, world):
    groups = ProcessGroups.create(layout(world, ep=2))
    model = build("plain")
    with torch.no_grad():
        model.head.weight[3, 5] += 1e-12 * rank
    with pytest.raises(ValueError, match=r"1 of \d+ parameters and buffers differ .* head\.weight first"):
        patch_model(model, DEDUP, groups)
    assert model.blocks[0].experts.gate_up_proj.shape[0] == EXPERTS
    seeded = build("plain", seed=rank)
    first = build("plain", seed=0)
    handle = patch_model(seeded, DEDUP, groups, broadcast=True)
    assert all(torch.equal(p, own(n, first.get_parameter(n), handle)) for n, p in seeded.named_parameters())
    handle.close()


def test_unsynced_steps_and_late_backwards_are_errors(pool):
    """Catches replicas that silently train apart because a sum was forgotten, or made twice."""
    pool.run(misuse_gradients, 2)


def misuse_gradients(rank, world):
    groups = ProcessGroups.create(layout(world, ep=1))
    ids = tokens(0, rank)
    model = build("plain")
    handle = patch_model(model, DEDUP, groups)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    bystander = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)

    ddp(ids, ids).loss.backward()
    bystander.step()
    with pytest.raises(RuntimeError, match="the sum of expert gradients over EP_DP: call sync_gradients"):
        optimizer.step()
    handle.sync_gradients()
    bystander.step()
    synced = {name: p.grad.clone() for name, p in handle.expert_parameters.items()}
    handle.sync_gradients()
    assert all(torch.equal(p.grad, synced[name]) for name, p in handle.expert_parameters.items())
    optimizer.step()

    for set_to_none in (True, False):
        optimizer.zero_grad(set_to_none=set_to_none)
        ddp(ids, ids).loss.backward()
        handle.attach(optimizer)
        optimizer.step()
        assert all(same_on_all(p.grad, groups.dp) and same_on_all(p, groups.dp) for p in model.parameters())

    # Skipping a step is allowed, and so is zeroing after it.
    optimizer.zero_grad(set_to_none=False)
    ddp(ids, ids).loss.backward()
    handle.clip_grad_norm_(1.0)
    optimizer.zero_grad(set_to_none=False)
    ddp(ids, ids).loss.backward()
    optimizer.step()

    # Without DDP: dense gradients too; a rank that did not run a backward.
    handle.close()
    alone = build("plain")
    handle = patch_model(alone, DEDUP, groups)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    alone(ids, ids).loss.backward()
    with pytest.raises(RuntimeError, match="the mean of dense gradients over DP and the sum of expert"):
        optimizer.step()
    handle.sync_gradients()
    with pytest.raises(RuntimeError, match="would count them 2 times"):
        alone(ids, ids).loss.backward()
    optimizer.step()
    out = alone(ids, ids).loss
    if rank == 0:
        out.backward()
    with pytest.raises(RuntimeError, match="some data-parallel ranks ran a backward"):
        handle.sync_gradients()
    with pytest.raises(ValueError, match=r"does not hold blocks\.0\.experts\.gate_up_proj"):
        handle.attach(torch.optim.SGD([alone.head.weight], lr=0.1))
    handle.close()


def same_on_all(tensor: torch.Tensor, group: dist.ProcessGroup) -> bool:
    values = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(values, tensor.detach().contiguous(), group=group)
    return all(torch.equal(value, tensor) for value in values)


def test_frozen_and_thawed_experts(pool):
    """Catches experts that are frozen when the model is patched and train with unscaled gradients later."""
    pool.run(thaw, 2)


def thaw(rank, world):
    groups = ProcessGroups.create(layout(world, ep=2))
    unpatched, model = build("plain"), build("plain")
    model.blocks[1].experts.requires_grad_(False)
    handle = patch_model(model, DEDUP, groups)
    ids = tokens(0, rank)
    model(ids, ids).loss.backward()
    assert model.blocks[1].experts.down_proj.grad is None
    model.zero_grad()
    model.blocks[1].experts.requires_grad_(True)
    model(ids, ids).loss.backward()
    handle.sync_gradients()
    optimizer = torch.optim.SGD(unpatched.parameters(), lr=0.0)
    expected = reference_step(unpatched, optimizer, [[tokens(0, r)] for r in range(world)], 1e6)
    for name, p in model.named_parameters():
        assert difference(p.grad, own(name, expected.gradients[name], handle)) < 1e-9, name
    handle.close()


def test_ddp_around_another_module_is_an_error(pool):
    """Catches DDP that does not see the list of experts to leave alone and replaces them with rank 0's."""
    pool.run(wrap_wrongly, 2)


def wrap_wrongly(rank, world):
    class Outer(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, ids):
            return self.inner(ids, ids).loss

    groups = ProcessGroups.create(layout(world, ep=2))
    model = build("plain")
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["embed.weight"])
    handle = patch_model(model, DEDUP, groups)
    assert "embed.weight" in model._ddp_params_and_buffers_to_ignore
    with pytest.raises(RuntimeError, match="DDP manages the sharded experts"):
        DistributedDataParallel(Outer(model))(tokens(0, rank))
    handle.close()
    with pytest.raises(ValueError, match="patch the model first, then wrap it"):
        patch_model(DistributedDataParallel(build("plain")), DEDUP, groups)
    with pytest.raises(ValueError, match=r"degrees that divide it: \[1, 2, 4, 8\]|not divisible by the EP degree 2"):
        patch_model(build("plain", experts=7), DEDUP, groups)
    with pytest.raises(ValueError, match="ep=2 must be 1"):
        patch_model(build("plain"), LOCAL, groups)
    with pytest.raises(ValueError, match="2 are running"):
        patch_model(build("plain"), DEDUP)


def test_one_process():
    """Catches an adapter that needs torch.distributed to do nothing."""
    unpatched, model = build("plain"), build("plain")
    handle = patch_model(model, LOCAL)
    optimizers = [torch.optim.AdamW(m.parameters()) for m in (unpatched, model)]
    expected = reference_step(unpatched, optimizers[0], [[tokens(0, 0)]], 0.5)
    ids = tokens(0, 0)
    out = model(ids, ids)
    out.loss.backward()
    assert abs(handle.clip_grad_norm_(0.5).item() - expected.norm) < 1e-9
    optimizers[1].step()
    assert all(difference(p, expected.parameters[name]) < 1e-9 for name, p in model.named_parameters())
    assert handle.full_state_dict().keys() == unpatched.state_dict().keys()
    handle.close()


def test_a_copy_of_a_patched_model_is_refused():
    """Catches a copy (for an average of weights, say) whose experts are silently those of the original."""
    model = build("plain")
    handle = patch_model(model, LOCAL)
    with pytest.raises(RuntimeError, match="copy the model first, then patch the copy"):
        copy.deepcopy(model)
    handle.close()


def test_a_compiled_model_gives_the_same():
    """Catches a dispatcher that torch.compile tries to trace."""
    model, ids = build("plain"), tokens(0, 0)
    handle = patch_model(model, LOCAL)
    plain = model(ids, ids).loss
    compiled = torch.compile(model, backend="eager")(ids, ids).loss
    compiled.backward()
    assert abs(plain.item() - compiled.item()) < 1e-12
    assert all(p.grad is not None for p in handle.expert_parameters.values())
    handle.close()
    torch.compiler.reset()


def test_infinite_norm_and_nonfinite_gradients():
    """Catches norms other than the Euclidean one summed like it."""
    unpatched, model = build("plain"), build("plain")
    handle = patch_model(model, LOCAL)
    ids = tokens(0, 0)
    for one in (unpatched, model):
        one(ids, ids).loss.backward()
    for order in (1.0, 3.0, float("inf")):
        expected = torch.nn.utils.get_total_norm([p.grad for p in unpatched.parameters()], order)
        assert difference(handle.clip_grad_norm_(1e9, order), expected) < 1e-9
    model.head.weight.grad[0, 0] = float("nan")
    with pytest.raises(RuntimeError, match="norm of order 2.0 is nan"):
        handle.clip_grad_norm_(1.0, error_if_nonfinite=True)
    handle.close()


def test_patterns_and_models_without_experts():
    """Catches a misspelled pattern that patches nothing, and a model that is trained as if it were sharded."""
    with pytest.raises(ValueError, match=r"pattern='block\.\*' matches none .* blocks\.0\.experts, blocks\.1\.experts"):
        patch_model(build("plain"), LOCAL, pattern="block.*")
    with pytest.raises(ValueError, match="Linear has no experts module"):
        patch_model(nn.Linear(2, 2), LOCAL)
    with pytest.raises(ValueError, match=r"groups is a Layout, not ProcessGroups: pass ProcessGroups\.create"):
        patch_model(build("plain"), LOCAL, layout(1))

    class OtherExperts(PlainExperts):
        def forward(self, hidden_states, sizes):
            return hidden_states

    with pytest.raises(ValueError, match=r"0 \(OtherExperts, forward\(hidden_states, sizes\)\)"):
        patch_model(nn.Sequential(OtherExperts()), LOCAL)
    model = build("plain")
    handle = patch_model(model, LOCAL)
    with pytest.raises(ValueError, match=r"blocks\.0\.experts is already patched"):
        patch_model(model, LOCAL)
    handle.close()


class Doubled(PlainExperts):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        return 2 * super().forward(hidden_states, top_k_index, top_k_weights)


class Squared(PlainExperts):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        return super().forward(hidden_states, top_k_index, top_k_weights**2)


class UpFirst(PlainExperts):
    """Stores the up half before the gate half, and says nothing of it."""

    def forward(self, hidden_states, top_k_index, top_k_weights):
        swapped = torch.cat(self.gate_up_proj.chunk(2, dim=1)[::-1], dim=1)
        plain = PlainExperts(self.num_experts)
        plain.gate_up_proj, plain.down_proj = nn.Parameter(swapped), self.down_proj
        return plain(hidden_states, top_k_index, top_k_weights)


class Transposed(PlainExperts):
    is_transposed = True  # says so, wrongly


class Limited(PlainExperts):
    def _apply_gate(self, gate_up):
        return gate_up.chunk(2, dim=-1)[1]  # says so, but does not do so


@pytest.mark.parametrize("lies", [Doubled, Squared, UpFirst, Transposed, Limited])
def test_a_module_that_computes_something_else_is_refused(lies):
    """Catches a layout guessed from marks: the module's own forward decides."""
    module = lies()
    before = dict(module.named_parameters())
    with pytest.raises(ValueError, match=r"the layout of x \(\w+\) is not known: .* experts='foreign'"):
        check_layout("x", module)
    assert dict(module.named_parameters()) == before and module.num_experts == EXPERTS
    check_layout("x", PlainExperts())


def test_unknown_parts_of_an_experts_module_are_refused():
    """Catches parameters that are cut although their rows are not experts, or kept although they are."""

    def patched(change):
        model = PlainModel(layers=1)
        change(model.blocks[0].experts)
        return patch_model(model, LOCAL, experts="ours")

    def add_parameter(experts):
        experts.scale = nn.Parameter(torch.ones(EXPERTS))

    def add_buffer(experts):
        experts.register_buffer("scale", torch.ones(EXPERTS))

    def trainable_activation(experts):
        experts.act_fn = nn.PReLU()

    def no_top_k(experts):
        del experts.config.num_experts_per_tok

    def on_meta(experts):
        experts.to("meta")

    for change, message in (
        (add_parameter, "holds scale, not known to have one row for each of its 8 experts"),
        (add_buffer, "holds scale, not known"),
        (trainable_activation, "trainable parameters"),
        (no_top_k, "does not say how many routes a token has .*: pass top_k="),
        (on_meta, "on the meta device"),
    ):
        with pytest.raises(ValueError, match=message):
            patched(change)
    with pytest.raises(ValueError, match="it normalises the output of every expert. experts='foreign'"):
        patch_model(build("plain", norm=True), LOCAL, experts="ours")
    with pytest.raises(ValueError, match="weight_at='input' scales what experts read"):
        patch_model(build("plain"), replace(LOCAL, weight_at="input"))
    with pytest.raises(ValueError, match="did you mean 'foreign'"):
        patch_model(build("plain"), LOCAL, experts="forein")
    tied = build("plain")
    tied.blocks[1].experts.down_proj = tied.blocks[0].experts.down_proj
    with pytest.raises(ValueError, match=r"blocks\.1\.experts\.down_proj and blocks\.0\.experts\.down_proj are one"):
        patch_model(tied, LOCAL)


def test_replaced_parameters_and_moved_models_are_errors():
    """Catches experts whose gradients are no longer scaled because someone exchanged the parameter objects."""
    model = build("plain")
    handle = patch_model(model, LOCAL)
    ids = tokens(0, 0)
    experts = model.blocks[0].experts
    experts.down_proj = nn.Parameter(experts.down_proj.detach().clone())
    with pytest.raises(RuntimeError, match=r"blocks\.0\.experts\.down_proj was replaced"):
        model(ids, ids)
    with pytest.raises(ValueError, match="was patched on cpu and called on meta"):
        model.blocks[1].experts(torch.zeros(1, HIDDEN, device="meta"), torch.zeros(1, TOP_K), torch.zeros(1, TOP_K))
    handle.close()


def test_experts_are_called_by_name_or_place_and_ids_past_the_end_are_no_route():
    """Catches a wrapper that takes positions alone, and transformers' mark for a masked route taken for an expert."""
    model, unpatched = build("plain"), build("plain")
    handle = patch_model(model, LOCAL)
    assert list(find_experts(model)) == ["blocks.0.experts", "blocks.1.experts"]
    x = torch.randn(3, HIDDEN, dtype=torch.float64)
    ids = torch.tensor([[0, EXPERTS], [EXPERTS, EXPERTS], [5, 1]])
    weights = torch.rand(3, TOP_K, dtype=torch.float64)
    expected = unpatched.blocks[0].experts(x, ids, weights)
    assert difference(model.blocks[0].experts(x, top_k_weights=weights, top_k_index=ids), expected) < 1e-12
    assert expected[1].abs().max() == 0 and expected.abs().max() > 0
    handle.close()


def test_fingerprint_depends_on_bits_and_places():
    """Catches a comparison of ranks that a swap, a shift or a change of the last bit passes."""
    x = torch.randn(1000, dtype=torch.float64)
    changed = [x.flip(0), x.roll(1), -x, x[:-1], torch.cat([x, x.new_zeros(1)])]
    last_bit = x.clone()
    last_bit.view(torch.int64)[7] ^= 1
    marks = [int(fingerprint(t)) for t in (x, last_bit, *changed)]
    assert len(set(marks)) == len(marks)
    assert int(fingerprint(x.view(20, 50).t().contiguous().t())) == marks[0]
    for dtype in (torch.bfloat16, torch.float16, torch.bool, torch.int32, torch.complex64, torch.uint8):
        assert int(fingerprint(x.to(dtype))) == int(fingerprint(x.to(dtype).clone()))


@pytest.mark.parametrize(
    ("given", "device", "layers", "checkpointing", "slots"),
    [
        ({}, "cuda", 16, False, 17),
        ({}, "cuda", 3, False, None),  # the default has enough
        ({}, "cuda", 4, False, 5),
        ({}, "cuda", 16, True, None),
        ({"slots": 2}, "cuda", 16, False, 2),
        ({}, "cpu", 16, False, None),  # grows by itself
        ({"dispatcher": "block"}, "cuda", 16, False, None),
    ],
)
def test_slots_are_counted_where_nothing_says_them(given, device, layers, checkpointing, slots):
    """Catches a model of five layers that stops at its fifth on GPUs, and a setting that is not obeyed."""
    shape = Shape(EXPERTS, TOP_K, HIDDEN, torch.bfloat16, torch.device(device))
    config = with_slots(EPConfig(**{"dispatcher": "rowwise", **given}), [shape] * layers, checkpointing)
    assert config.slots == slots


def test_patch_model_counts_its_layers_and_sees_checkpointing(monkeypatch):
    """Catches a patched model that nobody counted, or whose checkpointing is not seen."""
    asked = []

    def counted(config, shapes, checkpointing):
        asked.append((len(shapes), checkpointing))
        return replace(config, slots=7)

    monkeypatch.setattr(huggingface, "with_slots", counted)
    model = PlainModel(layers=2)
    handle = patch_model(model, EPConfig(dispatcher="local"))
    assert asked == [(2, False)] and handle.dispatchers.config.slots == 7
    handle.close()
    assert not huggingface._checkpoints(PlainModel(layers=1))
    for name in ("is_activation_checkpointing", "is_gradient_checkpointing"):
        assert huggingface._checkpoints(type("Checkpointed", (PlainModel,), {name: True})(layers=1))
