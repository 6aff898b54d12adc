"""Which of Megatron's settings our dispatchers honour, and how many leases its pipeline schedule needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..config import EPConfig, check_config, one_of

EXPERTS = ("megatron", "plugin")
# Their products take rows padded per expert to 16 (mxfp8: 32), which TEGroupedMLP or the dispatcher does.
FP8_RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")
_OVERLAPS = ("overlap_moe_expert_parallel_comm", "moe_shared_expert_overlap")  # of communication with other work


def check_options(config: Any, ep: EPConfig, experts: str, *, ep_size: int, etp_size: int) -> None:
    """``ValueError`` naming the first setting of Megatron's ``config`` that ``ep`` cannot honour."""
    one_of("experts", experts, EXPERTS)
    check_config(ep)
    if ep.schedule.kind != "none":
        beside = [name for name in _OVERLAPS if getattr(config, name, False)]
        raise ValueError(
            f"schedule.kind={ep.schedule.kind!r}: Megatron calls dispatch, experts and combine one by one, and waves"
            " run them as one step; use schedule.kind='none'. Megatron's own overlaps work over this dispatcher:"
            f" {' and '.join(_OVERLAPS)} ({', '.join(beside) or 'none'} is on)"
        )
    if ep.dispatcher == "local" and ep_size > 1:
        raise ValueError(
            f"dispatcher='local' moves no rows between ranks, but expert_model_parallel_size={ep_size}: use 'rowwise'"
            " or 'block'"
        )
    needed = "input" if experts == "plugin" and config.moe_apply_probs_on_input else "hidden"
    if ep.weight_at != needed:
        raise ValueError(
            f"weight_at={ep.weight_at!r}: Megatron applies the router's probabilities inside the experts; with"
            f" experts={experts!r} and moe_apply_probs_on_input={config.moe_apply_probs_on_input} weight_at must be"
            f" {needed!r}"
        )
    if (
        getattr(config, "moe_paged_stash", False)
        or getattr(config, "moe_expert_rank_capacity_factor", None) is not None
    ):
        raise ValueError(
            "moe_paged_stash and moe_expert_rank_capacity_factor belong to Megatron's own backends: leave them off and"
            " set capacity.policy and capacity.factor of the EPConfig instead"
        )
    if ep.precision == "mxfp8":
        _check_mxfp8(config, experts)
    if experts == "megatron":
        _check_their_quantisation(config)
    _check_graphs(config, experts)
    offloaded = getattr(config, "offload_modules", None) or ()
    if ep.dispatcher == "rowwise" and ep.form == "route" and "expert_fc1" in offloaded:
        raise ValueError(
            "offload_modules has 'expert_fc1', whose input lies in symmetric memory under form='route': use 'dedup'"
        )
    if experts == "plugin":
        _check_plugin_experts(config, etp_size)


def _check_mxfp8(config: Any, experts: str) -> None:
    if experts != "plugin":
        raise ValueError(
            f"precision='mxfp8' moves rows and computes the experts in one node, but experts={experts!r} leaves them to"
            " Megatron: use experts='plugin', or precision='bf16' (with Megatron's own fp8 recipe, if wanted)"
        )
    for name in ("fp8", "fp4"):
        recipe = getattr(config, name, None)
        if recipe:
            raise ValueError(
                f"{name}={recipe!r} quantises Megatron's own modules, the experts' weights among them, which"
                f" precision='mxfp8' quantises itself: turn {name} off, or use precision='bf16' with experts='megatron'"
            )
    if config.overlap_moe_expert_parallel_comm:
        raise ValueError(
            "overlap_moe_expert_parallel_comm runs dispatch, experts and combine apart, but precision='mxfp8' makes"
            " them one autograd node: turn it off"
        )
    widths = {"hidden_size": config.hidden_size, "moe_ffn_hidden_size": config.moe_ffn_hidden_size}
    for name, width in widths.items():
        if width is not None and width % 32:
            raise ValueError(f"{name}={width}: precision='mxfp8' quantises blocks of 32 values; use a multiple of 32")


def _check_their_quantisation(config: Any) -> None:
    recipe = getattr(config.fp8_recipe, "value", config.fp8_recipe) if config.fp8 else None
    if recipe is not None and recipe not in FP8_RECIPES:
        raise ValueError(
            f"fp8_recipe={recipe!r}: how many rows per expert its products take is not known; use one of"
            f" {', '.join(FP8_RECIPES)}"
        )
    if getattr(config, "use_transformer_engine_op_fuser", False):
        raise ValueError(
            "use_transformer_engine_op_fuser computes the experts from row counts on the device, in groups of 256 rows,"
            " for Megatron's own backends: turn it off"
        )


def _check_graphs(config: Any, experts: str) -> None:
    impl = getattr(config, "cuda_graph_impl", "none")
    if impl == "none":
        return
    scopes = getattr(config, "cuda_graph_modules", None)
    if scopes is None:
        scopes = getattr(config, "cuda_graph_scope", None)
    names = [str(getattr(scope, "name", scope)) for scope in (scopes or ())]
    if "moe_preprocess" in names:
        raise ValueError(
            "CUDA graph scope 'moe_preprocess' ends between the route map and the dispatch, which share more than"
            " tensors: leave it out (attn, moe_router and the whole 'moe' can stay)"
        )
    whole = impl in ("full_iteration", "local") and (not names or "full_iteration" in names)
    if experts == "megatron" and (whole or "moe" in names) and not config.moe_pad_expert_input_to_capacity:
        raise ValueError(
            f"cuda_graph_impl={impl!r} captures the experts, which read their row counts on the host: use"
            " experts='plugin', or moe_pad_expert_input_to_capacity"
        )


def _check_plugin_experts(config: Any, etp_size: int) -> None:
    refused = {
        f"expert_tensor_parallel_size={etp_size}": etp_size > 1,
        "fp8": bool(config.fp8),
        "fp4": bool(getattr(config, "fp4", None)),
        "delay_wgrad_compute": getattr(config, "delay_wgrad_compute", False),
        "overlap_dispatch_backward_with_experts_wgrad": getattr(
            config, "overlap_dispatch_backward_with_experts_wgrad", False
        ),
        "use_te_activation_func": config.use_te_activation_func,
        "quant_recipe": getattr(config, "quant_recipe", None) is not None,
        "moe_single_grouped_weight": getattr(config, "moe_single_grouped_weight", False),
        "moe_single_grouped_bias": getattr(config, "moe_single_grouped_bias", False),
        "expert_gtp_weight_remat_size": getattr(config, "expert_gtp_weight_remat_size", 1) > 1,
        "moe_mlp_glu_interleave_size": getattr(config, "moe_mlp_glu_interleave_size", None) is not None,
        "fine_grained_activation_offloading": getattr(config, "fine_grained_activation_offloading", False),
        "activation_func_fp8_input_store": getattr(config, "activation_func_fp8_input_store", False),
    }
    for name, on in refused.items():
        if on:
            raise ValueError(f"{name} is not available with experts='plugin': turn it off, or use experts='megatron'")


def forwards_in_flight(
    *, pp_size: int, pp_rank: int, chunks: int, group_size: int, overlap: bool, num_microbatches: int | None
) -> int:
    """The most model-chunk forwards whose backward is still to come, on pipeline rank ``pp_rank`` of ``pp_size``.

    Megatron's schedules (1F1B; interleaved for ``chunks`` > 1, in groups of ``group_size`` microbatches) run their
    warm-up forwards and one more before the first backward. ``overlap`` (overlap_moe_expert_parallel_comm) runs one
    ahead. ``num_microbatches`` bounds it; None: not known.
    """
    warmup = 0
    if pp_size > 1:
        warmup = pp_size - pp_rank - 1
        if chunks > 1:
            warmup = 2 * warmup + (chunks - 1) * group_size
    forwards = warmup + 1 + int(overlap)
    return forwards if num_microbatches is None else min(forwards, num_microbatches * chunks)


def leases_needed(config: Any, ep: EPConfig, experts: str, layers: int, in_flight: int) -> int:
    """Payload slots for ``layers`` MoE layers of a model chunk and ``in_flight`` forwards of chunks.

    A lease lasts until the weight gradient has read the rows where the experts keep them in symmetric memory, and as
    long as one dispatch where they do not: dedup with Megatron's experts, which keep rows of their own, and recomputed
    layers, whose forward keeps nothing and which lease again in backward, all layers of one region at a time.
    """
    if ep.form == "dedup" and experts == "megatron":
        return 2
    recomputed, region = 0, 0
    if config.recompute_granularity == "selective" and "moe" in (config.recompute_modules or ()):
        recomputed, region = layers, 1
    elif config.recompute_granularity == "full":
        each = config.recompute_num_layers or 1
        uniform = config.recompute_method != "block"
        recomputed = layers if uniform else min(layers, each)
        region = min(layers, each) if uniform else 1
    return max(2, (layers - recomputed) * in_flight + region)


def schedule_leases(config: Any, ep: EPConfig, experts: str, layers: Sequence[int]) -> int:
    """``leases_needed`` for the pipeline schedule of ``config`` on this rank of Megatron's parallel state.

    ``layers``: MoE layers of every model chunk, or one number for all chunks, of which each is taken to have its part.
    """
    from megatron.core import parallel_state

    pp_size = config.pipeline_model_parallel_size
    chunks = config.virtual_pipeline_model_parallel_size or 1
    in_flight = forwards_in_flight(
        pp_size=pp_size,
        pp_rank=parallel_state.get_pipeline_model_parallel_rank() if pp_size > 1 else 0,
        chunks=chunks,
        group_size=config.microbatch_group_size_per_vp_stage or pp_size,
        overlap=config.overlap_moe_expert_parallel_comm,
        num_microbatches=_num_microbatches(),
    )
    most = max(layers) if len(layers) > 1 else -(-layers[0] // chunks)
    return leases_needed(config, ep, experts, most, in_flight)


def _num_microbatches() -> int | None:
    """Microbatches of a step, where the training script has set up Megatron's calculator and they do not ramp up."""
    from megatron.core import num_microbatches_calculator as calculator

    current = calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR
    if current is None or getattr(current, "rampup_batch_size", None):
        return None
    return int(calculator.get_num_microbatches())
