"""Decodes over a mesh as one of two processes: python -m tests.decode.in_processes MODELS MESH OUT PORT I."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from specjax import config
from specjax.models.hf import load_model
from specjax.runtime import distributed
from tests.decode import test_mesh


def main() -> None:
    models, mesh, out, port, process = sys.argv[1:]
    distributed.start(config.Distributed(True, f"localhost:{port}", 2, int(process)))
    target = load_model(Path(models) / "target", mesh=test_mesh.mesh_of(mesh))
    found = test_mesh.tokens_of(target, test_mesh.drafter_of("draft", Path(models), target))
    (Path(out) / f"{process}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
