"""Run a config, or every point of its sweep: `specjax run` and `specjax sweep` from a clone.

    python experiments/run.py configs/demo.yaml [a.b=v]...

Exit status: 1 if a run of a sweep failed, 2 for a config that cannot be used, 130 after Ctrl-C, 143 after SIGTERM
(training saves first).
"""

from specjax import cli
from specjax.jobs.sweep import run_or_sweep

if __name__ == "__main__":
    cli.run_main(run_or_sweep, __doc__)
