"""Settings of the expert-parallel path, as dataclasses that Hydra reads as structured configs.

``EPConfig.validate`` checks everything that can be known without a device or a process group and quotes the bad value;
what depends on the machine (CUDA, peers, installed packages) is checked by ``heap.open_heap`` and
``dispatch.build_dispatcher``."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, field
from typing import Any

DISPATCHERS = ("local", "block", "rowwise", "deepep")
FORMS = ("dedup", "route")
HEAPS = ("auto", "shm", "torch", "nvshmem")
TRANSPORTS = ("peer", "device")
PERMUTES = ("torch", "te")
POLICIES = ("dropless", "rank", "source", "expert")
WEIGHT_AT = ("hidden", "input", "output", "source")
FILLS = ("none", "zero", "nan")
SCHEDULES = ("none", "wave_sequential", "wave_overlapped", "auto")
WAVES_BY = ("token", "expert")
SPARED = ("first", "all")
PRECISIONS = ("bf16", "mxfp8")
ROUNDINGS = ("rceil", "floor")
FORMATS = ("mxfp8", "bf16")
GEMMS = ("auto", "cpu_ref", "sm90_bf16", "sm90_fp8row", "sm100_mx", "sm100_te")


def one_of(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise ``ValueError`` naming the setting, the value, the choices and the closest of them."""
    if value in choices:
        return
    close = difflib.get_close_matches(str(value), choices, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"{name}={value!r} is not one of {', '.join(choices)}{hint}")


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value > 0


@dataclass
class CapacityConfig:
    """How many routes an expert rank accepts (report, section 10.3 and Figure 16).

    ``policy``: ``dropless`` accepts every route; ``rank`` accepts ceil(f·K·ΣT_r/M) rows per expert rank, later experts
    overflow first; ``source`` gives every source ceil(f·K·T_r/M) rows on each expert rank; ``expert`` gives every
    source ceil(f·K·T_r/E) rows of each expert. ``factor`` is f, taken as the exact decimal that was written. Under
    ``dropless`` it only sizes the buffers where the row count is not known on the host."""

    policy: str = "dropless"
    factor: float = 1.25

    def validate(self) -> None:
        one_of("capacity.policy", self.policy, POLICIES)
        if not _positive(self.factor):
            raise ValueError(f"capacity.factor={self.factor!r} must be a positive finite number, 1.25 for example")


@dataclass(unsafe_hash=True)
class LaunchConfig:
    """How rowwise kernels are launched on GPUs; ``ep-bench tune`` finds the values of a shape.

    ``chunks``: parts of a batch whose transfer overlaps with the local work on the part before; 0 chooses by its size.
    ``back``: the same for partial sums on their way to the tokens; 0 takes ``chunks``, or chooses too. ``put``,
    ``fan_out``, ``reduce``, ``sum``: programs of each kernel at most; 0 takes the kernel's default. ``table``: a file
    of ``ep-bench tune --store``; what is 0 here is taken from its point of the shape, if there is one.
    ``early``: rows start to cross while the route map is built. It pays where most rows leave the rank; where many
    stay, the map's kernels are slowed by the transfer and the local rows wait for them."""

    chunks: int = 0
    put: int = 0
    fan_out: int = 0
    reduce: int = 0
    sum: int = 0
    early: bool = False
    back: int = 0
    table: str | None = None

    def validate(self) -> None:
        for name in ("chunks", "back"):
            if not 0 <= getattr(self, name) <= 64:
                raise ValueError(
                    f"launch.{name}={getattr(self, name)} must be 1 to 64, or 0 to choose by the size of a batch"
                )
        for name in ("put", "fan_out", "reduce", "sum"):
            if getattr(self, name) < 0:
                raise ValueError(
                    f"launch.{name}={getattr(self, name)} must be a number of programs, or 0 for the default"
                )


@dataclass(unsafe_hash=True)
class DeepEPConfig:
    """How DeepEP is driven; ``ep-bench tune --backend deepep`` finds the values of a shape.

    ``sms``: multiprocessors that a movement's main kernel occupies (even; its copies use all). ``qps``: queue pairs in
    use and ``allocated_qps`` made, per peer, where rows cross a network; 0 leaves the choice to DeepEP. ``hybrid``:
    rows cross nodes once and are spread there over NVLink; null: where the group spans nodes. ``host_sync``: wait for
    the row counts on the host, so that the buffers of received rows are exact and not those of the worst case, tokens
    of all ranks times min(K, E_l)."""

    sms: int = 64
    qps: int = 0
    allocated_qps: int = 0
    hybrid: bool | None = None
    host_sync: bool = False

    def validate(self) -> None:
        if self.sms < 4 or self.sms % 2 or self.sms > 160:
            raise ValueError(f"deepep.sms={self.sms} must be an even number of multiprocessors from 4 to 160")
        if self.qps < 0 or self.qps == 1:
            raise ValueError(f"deepep.qps={self.qps} must be at least 2, or 0 for DeepEP's choice")
        if self.allocated_qps < 0 or 0 < self.allocated_qps < max(2, self.qps):
            raise ValueError(
                f"deepep.allocated_qps={self.allocated_qps} must be at least deepep.qps={self.qps}, or 0 for DeepEP's"
                " choice"
            )


@dataclass
class ScheduleConfig:
    """When rows move and when experts compute (report, section 5.9).

    ``kind``: ``none`` dispatches, computes and combines the whole batch, one after another. ``wave_overlapped`` cuts it
    into ``waves`` parts, so that dispatch of the next part, experts of this one and combine of the one before run
    beside each other. ``wave_sequential`` runs the same parts on one stream: the control that separates smaller
    products from running beside communication. ``auto`` takes what was fastest for the shape in ``table``, a file that
    ``ep-bench waves`` writes, and ``none`` for a shape that is not in it.

    ``by``: parts of consecutive tokens, or of consecutive experts; the latter multiply what ``form='dedup'`` moves.
    ``width``: multiprocessors' worth of programs for the kernels that cross the link, under every schedule; 0 keeps
    ``launch``. ``spare``: multiprocessors that expert GEMMs leave to communication under ``wave_overlapped``; null
    takes ``width``, at most 32, or 16 where that is 0, and fewer for experts wider than 1,536. ``spared``: which GEMMs
    of a wave leave them, the ``first``, beside which most of its neighbours' rows travel, or ``all``."""

    kind: str = "none"
    waves: int = 2
    by: str = "token"
    width: int = 0
    spare: int | None = None
    spared: str = "first"
    table: str | None = None

    def validate(self) -> None:
        one_of("schedule.kind", self.kind, SCHEDULES)
        one_of("schedule.by", self.by, WAVES_BY)
        one_of("schedule.spared", self.spared, SPARED)
        if not 1 <= self.waves <= 64:
            raise ValueError(f"schedule.waves={self.waves} must be 1 to 64")
        if self.width < 0:
            raise ValueError(f"schedule.width={self.width} must be a number of multiprocessors, or 0 to keep launch")
        if self.spare is not None and self.spare < 0:
            raise ValueError(f"schedule.spare={self.spare} must be a number of multiprocessors, or null")
        if self.kind == "auto" and self.table is None:
            raise ValueError(
                "schedule.kind='auto' chooses from a table: set schedule.table to a file that ep-bench waves wrote"
            )


@dataclass
class LegsConfig:
    """How rows travel in each of the four movements (report, Table 8): ``mxfp8``, or ``bf16``, which is the rows' own
    dtype."""

    dispatch: str = "mxfp8"
    combine: str = "mxfp8"
    combine_backward: str = "mxfp8"
    dispatch_backward: str = "mxfp8"

    def validate(self, dispatcher: str | None = None) -> None:
        for name, value in vars(self).items():
            one_of(f"mxfp8.legs.{name}", value, FORMATS)
            if dispatcher == "deepep" and name != "dispatch" and value != "bf16":
                raise ValueError(
                    f"mxfp8.legs.{name}={value!r}: DeepEP carries MXFP8 in the dispatch of the forward pass only;"
                    " set the other three legs to 'bf16', or use dispatcher='rowwise' or 'block'"
                )


@dataclass
class MXFP8Config:
    """What ``precision='mxfp8'`` means.

    ``rounding`` of the scales: ``rceil`` never saturates, ``floor`` is the rule of the OCP specification. ``legs``: the
    format of each movement. ``gemm``: what multiplies expert rows (``ep_plugin.mxfp8.gemm``); ``auto`` chooses by the
    device. ``fast_accum``: ``sm90_fp8row`` keeps fewer bits between the steps of a sum; faster, less exact."""

    rounding: str = "rceil"
    legs: LegsConfig = field(default_factory=LegsConfig)
    gemm: str = "auto"
    fast_accum: bool = False

    def validate(self, dispatcher: str | None = None) -> None:
        """Raise ``ValueError`` quoting the setting, its value and what would be right for ``dispatcher``."""
        one_of("mxfp8.rounding", self.rounding, ROUNDINGS)
        one_of("mxfp8.gemm", self.gemm, GEMMS)
        self.legs.validate(dispatcher)
        if self.fast_accum and self.gemm != "sm90_fp8row":
            raise ValueError(f"mxfp8.fast_accum=True is a setting of gemm='sm90_fp8row', not of gemm={self.gemm!r}")


@dataclass
class EPConfig:
    """One expert-parallel path.

    ``dispatcher``: ``local`` (no EP), ``block`` (all-to-all of packed blocks, host split lists), ``rowwise``
    (one-sided rows on a symmetric heap) or ``deepep`` (DeepEP v2, an engine of its own). ``form`` of rowwise:
    ``dedup`` sends a token once per expert rank, ``route`` once per route (the report's form). ``heap``: the symmetric
    heap of rowwise. ``transport`` of rowwise on GPUs: ``peer`` stores and loads through pointers to the other GPUs'
    memory; ``device`` calls NVSHMEM's own put and get, which need none, and so reach GPUs of other machines
    (heap='nvshmem'). ``permute`` of block: torch's index operations, or ``te``, TransformerEngine's fused kernels, for
    tokens that name an expert at most once. ``weight_at``: where the router weight is applied (``hidden`` before the
    down projection, ``input`` before the up projection, ``output`` in the sum on the expert rank, ``source`` in the
    sum at the token). ``max_tokens``: the most tokens a rank passes to one layer call;
    ``None`` sizes buffers from what is seen and grows them where the row counts are visible on the host. ``slots``:
    payload buffers, one for each MoE layer call whose backward has not run, so MoE layers · forwards in flight, and
    one for layers that are checkpointed (``dispatch.slots_for``); ``None`` grows on demand on CPU and is 4 on GPUs,
    where adapters count the layers themselves.
    ``timeout_s``: how long any wait for a peer lasts, in a step and while a dispatcher is built, before it fails and
    stops the group (of deepep in a step: before the GPU traps). ``precision``: ``bf16`` keeps rows in their own dtype;
    ``mxfp8`` moves and multiplies them as ``mxfp8`` says, in one autograd node of dispatch, experts and combine.
    ``diagnostic_fill`` clears (``zero``) or poisons (``nan``) every buffer before use; it costs a pass over the whole
    buffer and is for debugging."""

    dispatcher: str = "rowwise"
    form: str = "dedup"
    heap: str = "auto"
    transport: str = "peer"
    permute: str = "torch"
    weight_at: str = "hidden"
    capacity: CapacityConfig = field(default_factory=CapacityConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    deepep: DeepEPConfig = field(default_factory=DeepEPConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    precision: str = "bf16"
    mxfp8: MXFP8Config = field(default_factory=MXFP8Config)
    max_tokens: int | None = None
    slots: int | None = None
    timeout_s: float = 300.0
    diagnostic_fill: str = "none"

    def validate(self) -> None:
        """Raise ``ValueError`` quoting the setting, its value and what would be right."""
        parts = (CapacityConfig, LaunchConfig, DeepEPConfig, ScheduleConfig, MXFP8Config)
        for name, part in zip(("capacity", "launch", "deepep", "schedule", "mxfp8"), parts, strict=True):
            value = getattr(self, name)
            if not isinstance(value, part):
                raise ValueError(f"{name}={value!r} must be a {part.__name__}: {name}={part.__name__}(...)")
        one_of("dispatcher", self.dispatcher, DISPATCHERS)
        one_of("form", self.form, FORMS)
        one_of("heap", self.heap, HEAPS)
        one_of("transport", self.transport, TRANSPORTS)
        if self.transport == "device":
            self._validate_device_transport()
        one_of("permute", self.permute, PERMUTES)
        if self.permute == "te" and (self.dispatcher != "block" or self.precision != "bf16"):
            raise ValueError(
                f"permute='te' moves plain rows of dispatcher='block', not of dispatcher={self.dispatcher!r} with"
                f" precision={self.precision!r}: use permute='torch'"
            )
        one_of("weight_at", self.weight_at, WEIGHT_AT)
        one_of("diagnostic_fill", self.diagnostic_fill, FILLS)
        self.capacity.validate()
        self.launch.validate()
        self.deepep.validate()
        self.schedule.validate()
        one_of("precision", self.precision, PRECISIONS)
        if self.precision == "mxfp8":
            self._validate_mxfp8()
        if self.dispatcher == "local" and self.schedule.kind != "none":
            raise ValueError(
                f"schedule.kind={self.schedule.kind!r} overlaps communication, and dispatcher='local' has none: use"
                " 'none'"
            )
        if self.dispatcher == "deepep":
            self._validate_deepep()
        if self.dispatcher == "rowwise" and self.form == "dedup" and self.weight_at == "source":
            raise ValueError(
                "weight_at='source' weights every route at the token, which excludes the sum on the expert rank that"
                " form='dedup' makes; use form='route', or weight_at='hidden' or 'output'"
            )
        for name in ("max_tokens", "slots"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name}={value!r} must be at least 1, or null to size it from what is seen")
        if not _positive(self.timeout_s):
            raise ValueError(f"timeout_s={self.timeout_s!r} must be a positive number of seconds")

    def _validate_device_transport(self) -> None:
        if self.heap not in ("auto", "nvshmem"):
            raise ValueError(
                f"transport='device' moves rows by NVSHMEM's own put and get, which needs heap='nvshmem', not"
                f" heap={self.heap!r}"
            )
        if self.dispatcher != "rowwise":
            raise ValueError(f"transport='device' is one of dispatcher='rowwise', not of {self.dispatcher!r}")
        if self.precision != "bf16":
            raise ValueError(
                f"precision={self.precision!r} moves its records through peer pointers: use transport='peer'"
            )
        if self.schedule.kind != "none":
            raise ValueError(
                f"schedule.kind={self.schedule.kind!r} moves waves at the same time, which would share the staging of"
                " transport='device': use schedule.kind='none' or transport='peer'"
            )

    def _validate_deepep(self) -> None:
        if self.weight_at == "source":
            raise ValueError(
                "weight_at='source' weights every route at the token, but DeepEP sums a token's rows on the expert"
                " rank; use weight_at='hidden' or 'output'"
            )

    def _validate_mxfp8(self) -> None:
        self.mxfp8.validate(self.dispatcher)
        if self.weight_at == "input":
            raise ValueError(
                "weight_at='input' multiplies rows that are already quantised under precision='mxfp8'; use 'hidden',"
                " 'output' or 'source'"
            )


def check_config(config: object) -> None:
    """``ValueError`` for what is no ``EPConfig`` (its name, a dict), or one whose settings are wrong."""
    if not isinstance(config, EPConfig):
        raise ValueError(f"config={config!r} must be an EPConfig: EPConfig(dispatcher='rowwise') for example")
    config.validate()


def check_shape(*, num_experts: int, top_k: int, hidden_size: int, ep: int) -> None:
    """Check a layer's shape against the EP degree ``ep``; ``ValueError`` quotes the values and the degrees that would
    work."""
    for name, value in (("num_experts", num_experts), ("top_k", top_k), ("hidden_size", hidden_size), ("ep", ep)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    if num_experts % ep:
        fits = [d for d in range(1, num_experts + 1) if num_experts % d == 0]
        raise ValueError(
            f"num_experts={num_experts} is not divisible by the EP degree {ep}; degrees that divide it: {fits}"
        )
    if top_k > num_experts:
        raise ValueError(f"top_k={top_k} is larger than num_experts={num_experts}")
