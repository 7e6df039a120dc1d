"""Chunks of a scheduler that real signals interrupt: prints how many, and fails if one leaves it without a state."""

from __future__ import annotations

import signal
import threading

import jax

from specjax.decode.decoder import Decoder
from specjax.decode.request import prepare
from specjax.decode.scheduler import Scheduler
from specjax.drafters.draft_model import DraftModel
from specjax.testing.toys import prefix_model, related

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a background job ignores
    target, interrupted = prefix_model(0), 0
    engine, params = Decoder(target, DraftModel(related(target, 1), 3)).engine(True)
    scheduler = Scheduler(engine, params, 4)
    scheduler.insert(prepare(target, 3, [[1, 2]], 2000, 0, True, {"temperature": 0.0}))
    scheduler.chunk(1)
    for i in range(300):
        timer = threading.Timer(2e-5 * (i % 50), signal.raise_signal, [signal.SIGINT])
        try:
            timer.start()
            scheduler.chunk(1)
            timer.join()
        except KeyboardInterrupt:
            interrupted += 1
            timer.join()
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(scheduler.state))
    print(interrupted)
