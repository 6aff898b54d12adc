"""The MoE architectures of the installed transformers, and which of them train here like the unpatched model."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

# Packages of transformers 5 that tests train and save, patched and unpatched, with the same result.
TESTED = frozenset(
    "afmoe aria axk1 axk2 bailing_hybrid beam cohere2_moe dbrx deepseek_ocr2 deepseek_v2 deepseek_v3 deepseek_v32"
    " deepseek_v4 diffusion_gemma dots1 dots3_note ernie4_5_moe ernie4_5_vl_moe exaone_moe flex_olmo flint gemma4"
    " glm4_moe glm4_moe_lite glm4v_moe glm5_next glm_moe_dsa gpt_oss granitemoe granitemoe_swa granitemoehybrid"
    " granitemoeshared hunyuan_v1_moe hy_v3 hy_v4 hy_v4_vl inkling inkling2 inkling2_loop jamba jetmoe kimi_linear"
    " kolibri1 laguna lara_mini lfm2_moe llama4 longcat_flash mellum mimo_v2_flash minimax minimax_m2 minimax_m3_vl"
    " mistral4 mistral_large4 mixtral muse_spark nemotron_h nllb_moe olmoe openai_privacy_filter phimoe qwen2_moe"
    " qwen3_5_moe qwen3_moe qwen3_next qwen3_omni_moe qwen3_vl_moe qwen4_exp sarvam_mla sarvam_moe solar_open step3p7"
    " switch_transformers unlimited_ocr zaya".split()
)
# Those of transformers 4.57.
TESTED_IN_4 = frozenset("deepseek_v3 gpt_oss mixtral olmoe qwen2_moe qwen3_moe".split())
REFUSED = {
    "doge": "its experts are rows of an embedding, too small to move tokens to",
    "vitpose_backbone": "not text: an expert for each data set, chosen by the caller",
}
NOTES = {
    "dbrx": "parameters [E·F, D] are read in place",
    "jetmoe": "attention experts too",
    "llama4": "weights scale what experts read",
    "longcat_flash": "identity experts are computed where the token is",
    "muse_spark": "experts run transformers' code: it normalises the output of each",
    "nllb_moe": "experts are modules; as in transformers, first choices run on expert 1 and second ones on expert 0",
    "sarvam_mla": "classes of deepseek_v3",
    "sarvam_moe": "classes of glm4_moe",
    "switch_transformers": "experts are modules; their parameters become views of one tensor",
}


@dataclass(frozen=True)
class Architecture:
    """One package of ``transformers.models`` with experts.

    ``experts``: its classes of that name (none where it borrows another package's, or has blocks of other names).
    ``status``: "tested"; "refused" (``note`` says why); "untested": not in our lists, so ``patch_model`` compares its
    experts with ours on small ones, and refuses what differs. ``registry``: it has a plan for transformers' own expert
    parallelism.
    """

    name: str
    experts: tuple[str, ...]
    status: str
    registry: bool
    note: str


def architectures() -> list[Architecture]:
    """What the installed transformers has, by name; ``ImportError`` where there is none. Imports no model."""
    root = _models()
    tested = TESTED_IN_4 if _major() == 4 else TESTED
    return [_read(path, tested) for path in sorted(root.iterdir()) if _holds_experts(path)]


def table(rows: list[Architecture]) -> str:
    """A Markdown table of ``rows``."""
    lines = ["| architecture | | registry | |", "|---|---|---|---|"]
    lines += [f"| {row.name} | {row.status} | {'yes' if row.registry else ''} | {row.note} |" for row in rows]
    return "\n".join(lines)


def _models() -> Path:
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        raise ImportError("transformers is not installed: pip install 'ep_plugin[hf]'")
    return Path(spec.origin).parent / "models"


def _major() -> int:
    from importlib.metadata import version

    return int(version("transformers").split(".")[0])


def _source(path: Path, kind: str) -> str:
    return "\n".join(file.read_text(encoding="utf-8") for file in sorted(path.glob(f"{kind}_*.py")))


def _classes(source: str) -> tuple[str, ...]:
    return tuple(re.findall(r"^class (\w*Experts?[A-Z]?\w*)\(", source, re.MULTILINE))


def _holds_experts(path: Path) -> bool:
    """Whether a class of the package is named after experts, or its config counts them."""
    if not (path / "__init__.py").exists():
        return False
    counted = re.search(r"^ +(self\.)?\w*experts?(_\w+)? *[:=]", _source(path, "configuration"), re.MULTILINE)
    return bool(_classes(_source(path, "modeling"))) or counted is not None


def _read(path: Path, tested: frozenset[str]) -> Architecture:
    name = path.name
    status = "tested" if name in tested else "refused" if name in REFUSED else "untested"
    plan = "ep_dispatch_experts" in _source(path, "configuration")
    note = REFUSED.get(name) or (NOTES.get(name, "") if tested is TESTED else "")
    return Architecture(name, _classes(_source(path, "modeling")), status, plan, note)
