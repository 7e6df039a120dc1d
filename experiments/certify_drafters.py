"""Certificates of each kind of draft of `configs/drafters` under each lossless rule, `dspark` also with blocks that its
confidence head ends: trained where `--runs` has no draft yet, as long as the overrides say, since exactness does not
depend on it. Exit status 1 if a check fails.

    python experiments/certify_drafters.py distill.steps=60 certify.total_variation=0.03 \
        [--kinds eagle3 mtp] [--runs runs/certified] [--results FILE]
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specjax import registry
from specjax.config import load_config
from specjax.jobs import distill
from specjax.jobs.certify import run_certify
from specjax.report import record

RECIPES = Path(__file__).parents[1] / "configs" / "drafters"
BY_HEAD = "certify.controller={kind: confidence, by: head, threshold: 0.4}"
# Neither selection nor a report of the text says anything of exactness.
BRIEF = ("selection.prompts=0", "eval.positions=1024")


def cases(kinds: list[str]) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """(kind, rule, overrides) of each certificate."""
    known = {name: registry.resolve(registry.VERIFIERS, name, "verifier") for name in registry.VERIFIERS}
    # Rows at temperature 0, which `greedy` judges, are in each certificate.
    rules = [name for name, rule in known.items() if rule.lossless and rule.noise != "none"]
    for rule, kind in itertools.product(rules, kinds):
        yield kind, rule, ()
    if "dspark" in kinds:
        yield "dspark", "block", (BY_HEAD,)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--kinds", nargs="+", default=sorted(path.stem for path in RECIPES.glob("*.yaml")))
    parser.add_argument("--runs", type=Path, default=Path("runs/certified"))
    parser.add_argument("--results", type=Path)
    args = parser.parse_intermixed_args()
    certificates: list[dict[str, Any]] = []
    for kind, rule, more in cases(args.kinds):
        overrides = [*args.overrides, *BRIEF, *more, f"verifier={rule}", f"out={args.runs / kind}"]
        config = load_config(RECIPES / f"{kind}.yaml", overrides)
        if not (args.runs / kind / "draft").is_dir():
            distill.run(config)
        begun = time.perf_counter()
        found = run_certify(config)
        seconds = time.perf_counter() - begun
        certificates.append({"kind": kind, "rule": rule, "overrides": more, "seconds": seconds, **found.to_json()})
        checks = "; ".join(f"{check.name}: {check.summary}" for check in found.checks)
        print(f"{kind}, {' '.join((rule, *more))}: {found.verdict} in {seconds:.0f} s: {checks}", flush=True)
        if args.results:
            record.write(args.results, {"certificates": certificates})
    return int(any(found["verdict"] != "PASS" for found in certificates))


if __name__ == "__main__":
    sys.exit(main())
