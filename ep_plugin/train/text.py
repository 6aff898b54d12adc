"""Real text as bytes: which files, their tokens, the batches of a step and the entropy to beat. Needs no torch."""

from __future__ import annotations

import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .settings import DataConfig

# Of the standard library's folder: not the library itself, or tests of it.
NOT_THE_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
BYTES = 256


@dataclass(frozen=True)
class Corpus:
    """``tokens`` uint8 [N]: the bytes of ``files`` files under ``source``, one after the other."""

    tokens: NDArray[np.uint8]
    files: int
    source: str


def corpus_files(config: DataConfig) -> tuple[Path, list[Path]]:
    """The folder (or file) of the text and its files in a fixed order; ``ValueError`` where there are none."""
    root = Path(config.path) if config.path is not None else Path(sysconfig.get_path("stdlib"))
    if config.path is not None and root.is_file():
        return root, [root]
    if not root.is_dir():
        raise ValueError(f"data.path={config.path!r} is neither a file nor a folder")
    left_out = NOT_THE_LIBRARY if config.path is None else set()
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in left_out]
        files += [Path(folder, name) for name in names if name.endswith(config.suffix)]
    if not files:
        raise ValueError(f"data.path={str(root)!r} holds no file that ends in data.suffix={config.suffix!r}")
    return root, sorted(files, key=lambda file: file.relative_to(root).as_posix())


def read_corpus(config: DataConfig) -> Corpus:
    """Read the text that ``config`` names. Every process reads the same bytes in the same order."""
    root, files = corpus_files(config)
    parts: list[bytes] = []
    missing = config.max_bytes
    for file in files:
        parts.append(file.read_bytes()[:missing])
        if missing is not None:
            missing -= len(parts[-1])
            if missing == 0:
                break
    return Corpus(np.frombuffer(b"".join(parts), dtype=np.uint8), len(parts), str(root))


def unigram_entropy(tokens: NDArray[np.uint8]) -> float:
    """Entropy of the byte frequencies in nats: the loss of the best model that looks at no context."""
    counts = np.bincount(tokens, minlength=BYTES)
    p = counts[counts > 0] / len(tokens)
    return float(-(p * np.log(p)).sum())


def batch(
    corpus: Corpus, *, seed: int, step: int, batch_size: int, seq_len: int, rank: int = 0, world: int = 1
) -> NDArray[np.int64]:
    """Rank ``rank``'s part int64 [batch_size / world, seq_len] of the global batch of ``step``.

    The batch depends on ``seed`` and ``step`` alone: the same for every world size, and a resumed run sees what it
    would have seen.
    """
    begin = np.random.default_rng([seed, step]).integers(len(corpus.tokens) - seq_len + 1, size=batch_size)
    share = batch_size // world
    mine = begin[rank * share : (rank + 1) * share]
    return corpus.tokens[mine[:, None] + np.arange(seq_len)].astype(np.int64)
