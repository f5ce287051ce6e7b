"""Text to token files, and token files to batches whose order is a pure function of the step."""
