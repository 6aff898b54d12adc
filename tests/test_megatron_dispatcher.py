"""What any of Megatron's token dispatchers must do for a layer: experts that leave rows as they are give back the
tokens, whatever the folding of tensor, expert and expert tensor parallelism, with routes dropped and padded or not.

Megatron's own dispatcher goes through the same checks, so that they are no stricter than it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from ep_plugin.config import EPConfig
from tests import megatron_models as mm

pytestmark = mm.marks
run = mm.run

WAYS: dict[str, EPConfig | None] = {
    "alltoall": None,
    "block": EPConfig(dispatcher="block"),
    "dedup": EPConfig(),
    "route": EPConfig(form="route"),
}
SIZES: list[dict[str, int]] = [
    dict(ep=4),
    dict(tp=2, ep=2, etp=1),
    dict(tp=4, ep=1, etp=4),
    dict(tp=2, ep=2, etp=2),
]


@dataclasses.dataclass
class Seen:
    """``out`` as x came, the experts' rows [N, H], their counts int64 [E_l] and the gradient of x from ``out`` itself
    times ``upstream``."""

    out: Tensor
    rows: Tensor
    tokens: Tensor
    grad: Tensor


def there_and_back(layer: Any, x: Tensor, probs: Tensor, routing: Tensor, upstream: Tensor | None = None) -> Seen:
    """The six calls around experts that apply the probabilities alone. Every rank of an expert's tensor parallel group
    gives what the whole expert would, so their sum is divided by their number."""
    dispatcher, x = layer.token_dispatcher, x.detach().requires_grad_()
    rows, weights = dispatcher.dispatch_preprocess(x, routing, probs)
    rows, weights = dispatcher.token_dispatch(rows, weights)
    rows, tokens, weights = dispatcher.dispatch_postprocess(rows, weights)
    y = dispatcher.combine_preprocess(rows * weights.unsqueeze(-1))
    out = dispatcher.combine_postprocess(dispatcher.token_combine(y))
    out = out / layer.config.expert_tensor_parallel_size
    torch.autograd.backward(out, out.detach() if upstream is None else upstream)
    return Seen(out.detach(), rows.detach(), tokens.cpu(), x.grad)


def close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-5, atol=1e-6)


def checks(sizes: dict[str, int], ep: EPConfig | None, rank: int) -> dict[str, bool]:
    """The outcome of every check for one folding and way."""
    from megatron.core.transformer.moe.moe_utils import get_capacity

    from ep_plugin.adapters.megatron import use_dispatcher

    handles: list[Any] = []

    def layer(**settings: Any) -> Any:
        made = mm.moe_layer(mm.config(sizes, num_attention_heads=4, **settings))  # equal weights each time
        if ep is not None:
            handles.append(use_dispatcher(made, ep))
        return made

    def tokens(*shape: int) -> Tensor:
        return torch.randn(*shape, mm.HIDDEN, generator=torch.Generator().manual_seed(rank))

    found = {}
    plain, x = layer(), tokens(4, 3)
    with torch.no_grad():
        probs, routing = plain.router(x)
    even = torch.ones_like(probs) / plain.router.topk
    seen = there_and_back(plain, x, even, routing, upstream=x)
    found["tokens come back"] = close(seen.out, x)
    found["gradients come back"] = close(seen.grad, x)
    found["rows are counted"] = int(seen.tokens.sum()) == seen.rows.shape[0]

    x = tokens(16)
    capacity = layer(moe_expert_capacity_factor=0.5)
    with torch.no_grad():
        probs, routing = capacity.router(x)
    even = torch.ones_like(probs) * (probs != 0) / plain.router.topk
    want = x * even.sum(1, keepdim=True)
    seen = there_and_back(capacity, x, even, routing, upstream=x)
    found["routes were dropped"] = bool((want - x).abs().max() > 0.1)
    found["what was kept comes back"] = close(seen.out, want)
    found["and its gradients"] = close(seen.grad, want)

    capacity = layer(moe_expert_capacity_factor=1.5)
    with torch.no_grad():
        probs, routing = capacity.router(x)
    dropped = there_and_back(capacity, x, probs, routing)
    padded_layer = layer(moe_expert_capacity_factor=1.5, moe_pad_expert_input_to_capacity=True)
    with torch.no_grad():
        probs, routing = padded_layer.router(x)
    padded = there_and_back(padded_layer, x, probs, routing)
    found["padding adds rows"] = padded.rows.shape[0] > dropped.rows.shape[0]
    # One quota for each rank whose tokens may come here: those of the EP group and of the expert's ETP group.
    quota = get_capacity(2 * 16, mm.EXPERTS, 1.5) * sizes["ep"] * sizes.get("etp", 1)
    found["every expert has its capacity"] = padded.tokens.tolist() == [quota] * len(padded.tokens)
    found["and no more without padding"] = int(dropped.tokens.max()) <= quota
    found["padded rows are counted"] = int(padded.tokens.sum()) == padded.rows.shape[0]
    found["padding changes no output"] = close(padded.out, dropped.out)
    found["padding changes no gradient"] = close(padded.grad, dropped.grad)

    for settings in (dict(), dict(moe_router_padding_for_quantization=True, fp8="hybrid")):
        multiples = layer()
        for name, value in settings.items():  # set now: building FP8 layers needs Transformer Engine
            setattr(multiples.config, name, value)
        x = tokens(32)
        with torch.no_grad():
            probs, routing = plain.router(x)
        seen = there_and_back(multiples, x, probs, routing)
        if not settings:
            dense = seen
    found["rows in multiples of 16"] = bool((seen.tokens % 16 == 0).all())
    found["which are counted"] = int(seen.tokens.sum()) == seen.rows.shape[0]
    found["multiples change no output"] = close(seen.out, dense.out)
    found["multiples change no gradient"] = close(seen.grad, dense.grad)
    for handle in handles:
        handle.close()
    return found


def every_folding(rank: int, world: int) -> dict[str, list[str]]:
    """The failed checks of every folding and way that has any."""
    failed = {}
    for sizes in SIZES:
        with mm.parallel(**sizes):
            for way, ep in WAYS.items():
                wrong = [name for name, right in checks(sizes, ep, rank).items() if not right]
                if wrong:
                    failed[f"{sizes} {way}"] = wrong
    return failed


def test_tokens_and_gradients_come_back_in_every_folding(run: mm.Run) -> None:
    """Rows of another rank's tokens or lost in a gather over tensor parallel ranks; a sum taken twice; padding that
    counts; capacity by other numbers than Megatron's."""
    for failed in run(every_folding, 4):
        assert not failed, failed
