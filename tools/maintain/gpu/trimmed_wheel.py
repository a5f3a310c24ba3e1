"""Split vLLM's large wheel into small ones. pip can install each: its RECORD names exactly its files.

One call of pip installs all parts into one folder, where they are one package.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import zipfile
from fnmatch import fnmatch
from pathlib import Path

#: {files of the wheel that are in no part: why the stages do not need them}
LEFT_OUT = {
    "vllm/vllm_flash_attn/_vllm_fa2_C.*": "FlashAttention 2, 129 MB. The stages use Triton attention",
    "vllm/_moe_C_*": "mixture of experts. The model of the stages is dense",
    "vllm/_flashmla*": "multi-head latent attention, which the model of the stages has not",
    "vllm/_qutlass_C.*": "a quantization that the model of the stages has not",
    "vllm/third_party/deep_gemm/*": "FP8 matrix products",
    "vllm/third_party/fmha_sm100/*": "attention for Blackwell",
    "vllm/third_party/tml_fa4/*": "FlashAttention 4",
    "vllm/vllm-rs": "the server in Rust. The stages use the one in Python",
}
#: {files with a separate wheel, so that each wheel fits into a folder: name of the wheel}
APART = {
    "vllm/_C_stable_libtorch.*": "vllm_operations",  # swap_blocks_batch, and what every model runs
    # On CUDA vLLM imports FlashAttention 2 or 3 with every attention (0.26.0 v1/attention/backends/fa_utils.py:23).
    "vllm/vllm_flash_attn/_vllm_fa3_C.*": "vllm_flash_attention",
}


def split(wheel: Path, folder: Path, left_out: dict[str, str], apart: dict[str, str]) -> list[Path]:
    """Write the parts of this wheel into the folder. Return them, the main part first.

    Raises ValueError if a pattern matches no file: the release has changed.
    """
    name, version, tag = wheel.name.removesuffix(".whl").split("-", 2)
    with zipfile.ZipFile(wheel) as whole:
        files = [file for file in whole.namelist() if not file.endswith("/")]
        unknown = [pattern for pattern in (*left_out, *apart) if not any(fnmatch(file, pattern) for file in files)]
        if unknown:
            raise ValueError(f"{wheel.name} has no file {unknown[0]}")
        parts: dict[str, dict[str, bytes]] = {name: {}}
        for file in files:
            if not any(fnmatch(file, pattern) for pattern in left_out):
                part = next((part for pattern, part in apart.items() if fnmatch(file, pattern)), name)
                parts.setdefault(part, {})[file] = whole.read(file)
    about_wheel = parts[name][f"{name}-{version}.dist-info/WHEEL"]
    written = []
    for part, content in parts.items():
        info = f"{part}-{version}.dist-info"
        if part != name:
            content[f"{info}/WHEEL"] = about_wheel
            content[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {part}\nVersion: {version}\n".encode()
        content.pop(f"{info}/RECORD", None)
        record = io.StringIO()
        rows = csv.writer(record, lineterminator="\n")  # names of vLLM's files have commas
        rows.writerows((file, f"sha256={_hash(data)}", len(data)) for file, data in content.items())
        rows.writerow((f"{info}/RECORD", "", ""))
        content[f"{info}/RECORD"] = record.getvalue().encode()
        written.append(folder / f"{part}-{version}-{tag}.whl")
        with zipfile.ZipFile(written[-1], "w", zipfile.ZIP_DEFLATED) as out:
            for file, data in content.items():
                out.writestr(file, data)
    return written


def _hash(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
