"""What one trial does with one device: steps, evaluation, checkpoints, schedules, optimizers."""
