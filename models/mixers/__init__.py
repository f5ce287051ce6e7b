"""The registry of mixers: name → (config class, module class)."""
