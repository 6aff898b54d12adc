"""Settings of one launch, as dataclasses that Hydra reads as structured configs.

Nothing here imports torch, so that a bad setting is reported within a second of the start.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore

from ..config import EPConfig, one_of

ARCHITECTURES = ("olmoe", "mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "megatron")
MEGATRON_EXPERTS = ("megatron", "plugin")
RECOMPUTE = ("none", "full", "moe")
TEXTS = ("bytes", "tokenizer")
DTYPES = ("float32", "bfloat16")
DEVICES = ("auto", "cpu", "cuda")
LAUNCHERS = ("local", "slurm")
BACKENDS = ("auto", "gloo", "nccl")


def at_least(minimum: float, **values: float) -> None:
    """Raise ``ValueError`` naming the first of ``values`` that is not a finite number of at least ``minimum``."""
    for name, value in values.items():
        if not (math.isfinite(value) and value >= minimum):
            raise ValueError(f"{name}={value!r} must be at least {minimum}")


@dataclass
class TopologyConfig:
    """Parallel degrees. The world left over by ``tp``, ``pp`` and ``cp`` is data parallel; ``ep: null`` spans all it
    can.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    etp: int = 1
    ep: int | None = 1

    def validate(self) -> None:
        """Raise ``ValueError`` for a degree below 1."""
        degrees = {"tp": self.tp, "pp": self.pp, "cp": self.cp, "etp": self.etp}
        at_least(1, **{f"topology.{name}": value for name, value in degrees.items()})
        if self.ep is not None:
            at_least(1, **{"topology.ep": self.ep})


@dataclass
class ModelConfig:
    """An MoE of random weights, by the names that the architectures share.

    ``expert_width`` is the width of one expert; ``head_dim`` null is hidden_size / num_heads. ``extra`` holds settings
    of the architecture's own transformers config, or of Megatron's TransformerConfig for ``architecture: megatron``,
    which trainer=megatron trains. The vocabulary holds bytes, so it has at least 256 entries.
    """

    architecture: str = "olmoe"
    vocab_size: int = 256
    hidden_size: int = 128
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 4
    head_dim: int | None = None
    num_experts: int = 16
    top_k: int = 4
    expert_width: int = 64
    max_length: int = 512
    aux_loss_coef: float = 0.01
    extra: dict[str, Any] = field(default_factory=dict)

    def validate(self) -> None:
        """Raise ``ValueError`` quoting the setting and what would be right."""
        one_of("model.architecture", self.architecture, ARCHITECTURES)
        at_least(256, **{"model.vocab_size": self.vocab_size})
        for name in ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "expert_width", "max_length"):
            at_least(1, **{f"model.{name}": getattr(self, name)})
        at_least(0, **{"model.aux_loss_coef": self.aux_loss_coef})
        if self.head_dim is not None:
            at_least(1, **{"model.head_dim": self.head_dim})
        for name, whole, part in (
            ("hidden_size", self.hidden_size, "num_heads"),
            ("num_heads", self.num_heads, "num_kv_heads"),
        ):
            if name == "hidden_size" and self.head_dim is not None:
                continue
            if whole % getattr(self, part):
                raise ValueError(f"model.{name}={whole} is not divisible by model.{part}={getattr(self, part)}")


@dataclass
class DataConfig:
    """Text to train on: ``path`` is a file or a folder (its files ending in ``suffix``); null takes the Python standard
    library of the running interpreter. ``max_bytes`` cuts the text."""

    path: str | None = None
    suffix: str = ".py"
    max_bytes: int | None = None

    def validate(self) -> None:
        """Raise ``ValueError`` for a limit that leaves no text."""
        if self.max_bytes is not None:
            at_least(1, **{"data.max_bytes": self.max_bytes})


@dataclass
class MegatronConfig:
    """What only Megatron's trainer has. ``experts``: who computes the experts, Megatron's modules or ours (``plugin``)
    over the same weights. ``microbatches`` of a step and data-parallel rank; ``virtual_stages``: model chunks of each
    pipeline rank; ``recompute``: ``full`` layers or their ``moe`` part; ``distributed_optimizer`` spreads the
    optimizer's state over the replicas; ``transformer_engine`` builds the layers of Transformer Engine's modules, which
    context parallelism and, on GPUs, tensor parallelism need.
    """

    experts: str = "megatron"
    microbatches: int = 1
    virtual_stages: int = 1
    recompute: str = "none"
    distributed_optimizer: bool = True
    transformer_engine: bool = False

    def validate(self) -> None:
        """Raise ``ValueError`` quoting the setting and what would be right."""
        one_of("trainer.megatron.experts", self.experts, MEGATRON_EXPERTS)
        one_of("trainer.megatron.recompute", self.recompute, RECOMPUTE)
        for name in ("microbatches", "virtual_stages"):
            at_least(1, **{f"trainer.megatron.{name}": getattr(self, name)})


@dataclass
class HFConfig:
    """What only transformers' Trainer has. ``microbatches`` of a step and rank; ``autocast``: bfloat16 products over
    float32 weights; ``checkpointing``: activations are computed again, routes are kept; ``compile``: torch.compile of
    the dense part; ``shard_optimizer`` spreads the optimizer's state over the ranks that hold the same parameters.
    ``weights``: a folder or an id of the hub of the model that ``model`` describes (null: random weights); ``text``:
    ``bytes``, or the tokens of the ``tokenizer`` of ``weights``.
    """

    microbatches: int = 1
    autocast: bool = False
    checkpointing: bool = False
    compile: bool = False
    shard_optimizer: bool = False
    weights: str | None = None
    text: str = "bytes"

    def validate(self) -> None:
        """Raise ``ValueError`` quoting the setting and what would be right."""
        at_least(1, **{"trainer.hf.microbatches": self.microbatches})
        one_of("trainer.hf.text", self.text, TEXTS)
        if self.text == "tokenizer" and self.weights is None:
            raise ValueError("trainer.hf.text='tokenizer' takes that of trainer.hf.weights, which is null")


@dataclass
class TrainerConfig:
    """The training loop. ``batch_size`` counts sequences over all ranks; ``seq_len`` counts bytes.

    ``clip_norm`` bounds the norm of the whole gradient (null: no clipping). ``checkpoint_every`` = 0 writes one
    checkpoint, at the end; ``resume`` is a checkpoint's folder. ``threads`` is torch's threads per process.
    ``megatron``: train with Megatron-Core instead of transformers (trainer=megatron). ``hf``: train with transformers'
    Trainer instead of the loop here (trainer=hf).
    """

    steps: int = 60
    batch_size: int = 16
    seq_len: int = 128
    lr: float = 3e-3
    warmup: int = 10
    weight_decay: float = 0.01
    clip_norm: float | None = 1.0
    dtype: str = "float32"
    device: str = "auto"
    threads: int = 1
    log_every: int = 10
    checkpoint: bool = True
    checkpoint_every: int = 0
    resume: str | None = None
    megatron: MegatronConfig | None = None
    hf: HFConfig | None = None

    def validate(self) -> None:
        """Raise ``ValueError`` quoting the setting and what would be right."""
        if self.megatron is not None and self.hf is not None:
            raise ValueError("trainer.megatron and trainer.hf are two trainers: choose trainer=megatron or trainer=hf")
        for own in (self.megatron, self.hf):
            if own is not None:
                own.validate()
        if self.hf is not None and self.hf.autocast and self.dtype != "float32":
            raise ValueError(f"trainer.hf.autocast=true needs float32 weights, but trainer.dtype={self.dtype!r}")
        for name in ("steps", "batch_size", "threads", "log_every"):
            at_least(1, **{f"trainer.{name}": getattr(self, name)})
        at_least(2, **{"trainer.seq_len": self.seq_len})
        for name in ("lr", "warmup", "weight_decay", "checkpoint_every"):
            at_least(0, **{f"trainer.{name}": getattr(self, name)})
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"trainer.clip_norm={self.clip_norm!r} must be positive, or null for no clipping")
        one_of("trainer.dtype", self.dtype, DTYPES)
        one_of("trainer.device", self.device, DEVICES)


@dataclass
class ClusterConfig:
    """Where the processes run: ``local`` (this machine, or whatever started torchrun) or ``slurm`` (a job of
    ``nodes`` nodes).
    """

    launcher: str = "local"
    nodes: int = 1
    backend: str = "auto"
    timeout_s: float = 600.0

    def validate(self) -> None:
        """Raise ``ValueError`` quoting the setting and what would be right."""
        one_of("cluster.launcher", self.launcher, LAUNCHERS)
        one_of("cluster.backend", self.backend, BACKENDS)
        at_least(1, **{"cluster.nodes": self.nodes, "cluster.timeout_s": self.timeout_s})
        if self.launcher == "local" and self.nodes != 1:
            raise ValueError(
                f"cluster.nodes={self.nodes} is for cluster=slurm; on several machines start torchrun on each"
            )


@dataclass
class CheckConfig:
    """What a launch must show to succeed. ``loss_difference``: the most by which the loss of any variant may differ,
    at any step, from the first variant's (null: anything). ``last_losses``: the most by which the mean loss of the last
    100 steps of any variant may differ from the first variant's, as a share of it (null: anything). ``below_unigram``:
    every final loss lies below the text's unigram entropy.
    """

    loss_difference: float | None = None
    last_losses: float | None = None
    below_unigram: bool = False


@dataclass
class RunConfig:
    """One launch. ``variants`` maps a name to overrides of these same settings: each is trained in turn, from the
    same seed and on the same batches, and the curves are compared; with none, the settings are trained as they are.

    ``patch_experts`` false leaves the model's experts as transformers made them (``ep=none``). ``nproc`` starts that
    many processes on this machine, as torchrun would. ``dry_run`` prints the settings and the topology and stops;
    ``debug`` shows tracebacks.
    """

    name: str = "run"
    seed: int = 0
    patch_experts: bool = True
    nproc: int | None = None
    dry_run: bool = False
    debug: bool = False
    topology: TopologyConfig = field(default_factory=TopologyConfig)
    ep: EPConfig = field(default_factory=EPConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    variants: dict[str, list[str]] = field(default_factory=dict)
    check: CheckConfig = field(default_factory=CheckConfig)

    def validate(self) -> None:
        """Raise ``ValueError`` for whatever can be known without the world size, the files and the machine."""
        if self.nproc is not None:
            at_least(1, nproc=self.nproc)
        for part in (self.topology, self.ep, self.model, self.data, self.trainer, self.cluster):
            part.validate()
        if self.trainer.seq_len > self.model.max_length:
            raise ValueError(
                f"trainer.seq_len={self.trainer.seq_len} is larger than model.max_length={self.model.max_length}"
            )


def register() -> None:
    """Put the schemas into Hydra's ConfigStore: ``run_schema`` and ``<group>/schema``. Idempotent."""
    store = ConfigStore.instance()
    store.store(name="run_schema", node=RunConfig, provider="ep_plugin")
    for group, node in (
        ("ep", EPConfig),
        ("model", ModelConfig),
        ("data", DataConfig),
        ("trainer", TrainerConfig),
        ("cluster", ClusterConfig),
    ):
        store.store(group=group, name="schema", node=node, provider="ep_plugin")
