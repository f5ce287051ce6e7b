"""Records in, numbers and figures out. Knows neither torch nor Ray."""
