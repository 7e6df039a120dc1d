"""The target's forward pass in training, which evaluation makes in the same way."""

from specjax.evaluation.teacher import target_output, with_shared_params

__all__ = ["target_output", "with_shared_params"]
