"""A GGUF file with the same model in other types, for llama.cpp beside specjax on the same weights.

    python experiments/requantise.py MODEL.gguf OUT.gguf Q8_0

The weights are first rounded to bfloat16, as `specjax export` and `make real` keep them. Vectors stay float32. Any type
that the package `gguf` writes, `TYPES`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np

TYPES = ("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")


def requantised(source: Path, out: Path, kind: gguf.GGMLQuantizationType) -> None:
    """Write ``source`` with its matrices stored as ``kind``, and all settings as they are."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(out, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue  # the writer's own
        writer.add_key_value(name, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(ml_dtypes.bfloat16).astype(np.float32)
        of = kind if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, of), raw_dtype=of)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("kind", metavar="TYPE", choices=TYPES)
    args = parser.parse_args()
    requantised(args.model, args.out, gguf.GGMLQuantizationType[args.kind])


if __name__ == "__main__":
    main()
