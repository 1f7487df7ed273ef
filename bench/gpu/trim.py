"""`python bench/gpu/trim.py VLLM.whl`: takes out what a dense model on a Hopper GPU never loads."""

import sys
import zipfile
from pathlib import Path

LEFT_OUT = (
    "vllm/vllm-rs",
    "vllm/_moe_C_stable_libtorch.",
    "vllm/_deepselect_C.",
    "vllm/_flashkda_C.",
    "vllm/_flashmla_C.",
    "vllm/_flashmla_extension_C.",
    "vllm/_qutlass_C.",
    "vllm/vllm_flash_attn/_vllm_fa2_C.",
    "vllm/third_party/deep_gemm/",
    "vllm/third_party/fmha_sm100/",
    "vllm/entrypoints/serve/instrumentator/static/",
)
"""Kernels of other models and GPUs, each imported where it is used or in a `try`; a front end in Rust; pages."""


def trim(wheel: Path) -> None:
    """Rewrites the wheel in place, its list of files too."""
    trimmed = wheel.with_suffix(".trimmed")
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(trimmed, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as rest:
        for entry in whole.infolist():
            if entry.filename.startswith(LEFT_OUT):
                continue
            data = whole.read(entry)
            if entry.filename.endswith(".dist-info/RECORD"):
                data = b"".join(line for line in data.splitlines(True) if not line.decode().startswith(LEFT_OUT))
            rest.writestr(entry, data)
    trimmed.replace(wheel)


if __name__ == "__main__":
    trim(Path(sys.argv[1]))
